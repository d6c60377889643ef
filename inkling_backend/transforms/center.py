"""Centering of keys: one constant vector a KV head less, which softmax does not see.

``q . (k - c) = q . k - q . c``, and ``q . c`` is the same for every key of a query. That holds as
long as all keys of a sequence have the same c, and a prefix cache makes any two tokens of a pool
part of one sequence: so c is fixed from the first key that a pool stores until the pool is emptied.

No calibration data is needed. K of many models carries a constant in a few channels, hundreds of
times its spread; the mean over the first keys a layer sees misses it by that spread over the square
root of their number, whatever the text. A mean that fits badly costs precision, never correctness.
"""

from __future__ import annotations

import torch

from inkling_backend.errors import InvalidTensorError

_LARGEST = 2.0**64


def center_of(keys: torch.Tensor) -> torch.Tensor:
    """Mean of keys ``[T, kv heads, D]`` over tokens: float32 ``[kv heads, D]``.

    A key with a NaN, an infinity or something above 2**64 is left out: it must not stay in the
    center for good.

    Raises:
        InvalidTensorError: keys has another shape.
    """
    if keys.ndim != 3:
        raise InvalidTensorError("keys", "shape", "[T, kv heads, D]", tuple(keys.shape))
    rows = keys.float()
    counts = (rows.abs() < _LARGEST).all(-1, keepdim=True)
    total = torch.where(counts, rows, 0.0).sum(0)
    return total / counts.sum(0).clamp(min=1)


class PoolCenters:
    """The center of every layer of one pool."""

    def __init__(self) -> None:
        self._centers: dict[int, torch.Tensor] = {}

    def of(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """The layer's center, `center_of` the keys ``[T, kv heads, D]`` of its first call."""
        if layer not in self._centers:
            self._centers[layer] = center_of(keys)
        return self._centers[layer]
