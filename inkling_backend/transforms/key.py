"""The exact transform of K, and what it asks of Q."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_backend.transforms.hadamard import rotate


@dataclass(frozen=True)
class KeyTransform:
    """Center, then rotate. Attention over the results is attention over what was given.

    Every operation rounds to float32, in an order of its own (`rotate`); a NaN that comes of it is
    the positive one. So kernels can have the same bits.

    Attributes:
        center: float32 ``[kv heads, D]`` taken from every key, or None.
        rotates: whether K and Q are multiplied by the Hadamard matrix.
    """

    center: torch.Tensor | None = None
    rotates: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether K and Q stay as they are."""
        return self.center is None and not self.rotates

    def key(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys ``[T, kv heads, D]`` as the cache stores them, float32."""
        rows = keys.float()
        if self.center is not None:
            rows = rows - self.center
        if self.rotates:
            rows = rotate(rows)
        return rows if self.is_identity else _one_nan(rows)

    def query(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries ``[T, query heads, D]`` that go with such keys, float32."""
        return _one_nan(rotate(queries)) if self.rotates else queries.float()


def _one_nan(rows: torch.Tensor) -> torch.Tensor:
    return torch.where(rows.isnan(), torch.nan, rows)
