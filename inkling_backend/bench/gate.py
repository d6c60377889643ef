"""The gate before every time: results against the float32 reference over the same cache."""

from __future__ import annotations

import torch

from inkling_backend.bench.data import Batch
from inkling_backend.cache import KVCachePool
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.reference import attend

# Bound of ||out - reference|| / ||reference||. Rounding the output to bfloat16 alone gives 0.002,
# rounding the probabilities about as much again.
ATTENTION_BOUND = 1e-2
# Requests that are compared, and query rows in each place of a request.
_REQUESTS, _ROWS = 3, 64


class GateError(Exception):
    """An operation's result is wrong; says by how much."""


def reason(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """``||got - expected|| / ||expected||`` in float32, infinite if got is not finite."""
    error = (got.float() - expected).norm() / expected.norm()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def attention_error(
    cache: LayerCache, batch: Batch, query: Query, out: torch.Tensor, layer: LayerAttention
) -> float:
    """Relative error of some of a batch's outputs.

    Compared are the first, the middle and the last request, and of their query rows the first, the
    middle and the last 64.

    Args:
        cache: the layer that was attended to.
        query: ``[B * new tokens, query heads, D]`` as attention read it.
        out: ``[B * new tokens, query heads, D]``.
    """
    n, device = batch.new_tokens, out.device
    requests: list[int] = []
    lens: list[int] = []
    rows: list[int] = []
    indptr = [0]
    for request in spread(len(batch.lens), 1, _REQUESTS):
        for first in spread(n, _ROWS, 3):
            last = min(first + _ROWS, n)
            requests.append(request)
            lens.append(batch.lens[request] - n + last)
            rows += range(request * n + first, request * n + last)
            indptr.append(len(rows))
    index = torch.tensor(rows, device=device)
    data, scale = query
    part = Query(data[index], None if scale is None else scale[index])
    got = out[index]
    expected = torch.empty(got.shape, dtype=torch.float32, device=device)
    attend(
        part,
        cache,
        batch.page_table[torch.tensor(requests, device=device)],
        torch.tensor(lens, device=device),
        torch.tensor(indptr, device=device),
        layer=layer,
        out=expected,
    )
    return relative_error(got, expected)


def spread(count: int, size: int, places: int) -> list[int]:
    """Starts of at most ``places`` pieces of ``size``, from the beginning to the end of count."""
    last = max(0, count - size)
    return sorted({last * i // max(1, places - 1) for i in range(places)})


def check_attention(error: float, bound: float = ATTENTION_BOUND) -> None:
    """
    Raises:
        GateError: the error is above the bound.
    """
    if not error <= bound:
        raise GateError(f"relative error {error:.3g} against the reference, at most {bound:g}")


def check_bytes(got: KVCachePool, layer: int, expected: KVCachePool) -> None:
    """Compare one layer of a pool with the only one of another, byte for byte.

    Raises:
        GateError: a buffer differs.
    """
    for name in ("k_data", "k_scale", "k_first", "v_data", "v_scale", "v_first"):
        mine, right = getattr(got.layer(layer), name), getattr(expected.layer(0), name)
        if right is not None:
            _check_equal(name, mine, right)


def check_query(got: Query, expected: Query) -> None:
    """
    Raises:
        GateError: a byte differs.
    """
    _check_equal("query", got.data, expected.data)
    if expected.scale is not None:
        if got.scale is None:
            raise GateError("query: not quantized")
        _check_equal("query scales", got.scale, expected.scale)


def _check_equal(name: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    different = int((got.view(torch.uint8) != expected.view(torch.uint8)).sum())
    if different:
        raise GateError(f"{name}: {different} of {expected.nbytes} bytes differ from the reference")
