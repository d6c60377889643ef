"""What attention over a cache must give, in float64, and by how much a kernel may be off.

Nothing here is fitted to what kernels were seen to do: the bound of an element adds up the
roundings that they are allowed. What is not finite obeys the rules of the README.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.kernels.configs import SplitRule
from tests.attention.world import World, rows_of, slots_of

FLOAT32_MAX = torch.finfo(torch.float32).max
# A sum of float32 products in any order, by tensor cores too, of at most 256 of them.
DOT_EPS = 2.0**-17
# Exponentials, sums of tokens, factors.
SUM_EPS = 2.0**-12
# Probabilities as bfloat16, or as float16 with fourteen powers of two above 1.
P_EPS = 2.0**-7.9
P_FLUSH = 2.0**-37


class Expected(NamedTuple):
    """All ``[n, query heads, Dv]``.

    value, bound: float64; a finite output is within ``bound`` of ``value``.
    nan: must be NaN. overflow: may be NaN or infinite, because a sum leaves float32's range or the
    result the model's dtype.
    """

    value: torch.Tensor
    bound: torch.Tensor
    nan: torch.Tensor
    overflow: torch.Tensor


def expect(
    world: World, request: int, q: torch.Tensor, positions: torch.Tensor, layer: LayerAttention
) -> Expected:
    """Attention of some rows of one request.

    Args:
        q: ``[n, Hq, Dk]``, dequantized.
        positions: ``[n]``, where those rows stand.
    """
    n, length = q.shape[0], world.lens[request]
    shape = (n, world.num_q_heads, world.layout.v_head_dim)
    if length == 0:
        zero = torch.zeros(shape, dtype=torch.float64)
        return Expected(zero, zero, zero.bool(), zero.bool())
    slots = slots_of(world, request)
    q = q.cpu().double()
    k, v = (rows_of(world, slots, side).cpu().double() for side in ("k", "v"))
    k, v = (x.repeat_interleave(world.group, dim=1) for x in (k, v))
    distance = positions[:, None] - torch.arange(length)
    hidden = distance < 0 if layer.causal else distance < -length
    if layer.window is not None:
        hidden = hidden | (distance > layer.window)
    seen = ~hidden  # [n, L]

    logits = torch.einsum("nhd,thd->hnt", q, k) * layer.sm_scale
    size_q, size_k = (x.abs().nan_to_num(0.0, 0.0, 0.0) for x in (q, k))
    size = torch.einsum("nhd,thd->hnt", size_q, size_k) * layer.sm_scale
    off = size * DOT_EPS + logits.abs().nan_to_num(0.0, 0.0, 0.0) * 2**-20
    # float16 holds a query to 2**-38 of its largest element; bfloat16 a key to 2**-133.
    off += 2**-36 * layer.sm_scale * torch.einsum("nh,thd->hnt", size_q.amax(-1), size_k)
    off += 2**-133 * layer.sm_scale * size_q.sum(-1).T[:, :, None]
    beyond = (size * max(1.0, 1.5 / layer.sm_scale) > FLOAT32_MAX / 8) | logits.isinf()
    global_scale = world.cache.k_global
    if global_scale is not None:
        beyond |= size / float(global_scale) > FLOAT32_MAX / 8
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
        off += layer.softcap * 2**-18

    row_nan = ((logits.isnan() | (logits == torch.inf)) & seen).any(-1)  # [Hq, n]
    row_overflow = (beyond & seen).any(-1)
    logits = logits.masked_fill(hidden, -torch.inf).nan_to_num(0.0, 0.0, -torch.inf)
    top = logits.amax(-1)
    sink = torch.full_like(top, -torch.inf)
    if layer.sinks is not None:
        given = layer.sinks.cpu().double()[:, None].expand_as(top)
        row_nan |= ~given.isfinite() & (given != -torch.inf)
        row_overflow |= given.abs() > FLOAT32_MAX / 2
        sink = given.nan_to_num(0.0, 0.0, -torch.inf)
    top = torch.maximum(top, sink)
    # Nothing but infinitely small logits: no answer, unless no token is seen at all.
    row_nan |= (top == -torch.inf) & seen.any(-1)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weight = torch.exp(logits - top[..., None])
    total = weight.sum(-1) + torch.exp(sink - top)
    weight = weight / total.masked_fill(total == 0, 1.0)[..., None]  # [Hq, n, L]

    bad_v = ~v.isfinite()
    element_nan = torch.einsum("nt,thd->nhd", seen.double(), bad_v.double()) > 0
    clean = v.masked_fill(bad_v, 0.0)
    value = torch.einsum("hnt,thd->nhd", weight, clean)
    size_v = torch.einsum("nt,thd->nhd", seen.double(), clean.abs())
    weighted = torch.einsum("hnt,thd->nhd", weight, clean.abs())
    slip = weight * torch.expm1(off.clamp(max=600.0))
    slip_sink = (
        torch.exp(sink - top)
        / total.masked_fill(total == 0, 1.0)
        * sink.abs().nan_to_num(0.0, 0.0, 0.0)
        * 2**-20
    )
    slip_total = slip.sum(-1) + slip_sink  # [Hq, n]
    rounding = torch.finfo(world.dtype).eps / 2 * 1.01
    bound = torch.einsum("hnt,thd->nhd", slip, clean.abs())
    bound += slip_total.T[..., None] * value.abs() + (P_EPS + SUM_EPS) * weighted
    bound += P_FLUSH * size_v + rounding * value.abs()
    # Where the logits say nothing, a mean of the rows of V still lies between them.
    bound = torch.where(slip_total.T[..., None] > 0.25, 2.1 * clean.abs().amax(0), bound)
    bound += float(torch.finfo(world.dtype).smallest_normal) * torch.finfo(world.dtype).eps * 1.01
    overflow = row_overflow.T[..., None].expand(shape)
    scale_v = 1.0 if world.cache.v_global is None else float(world.cache.v_global)
    overflow = overflow | (size_v / scale_v > FLOAT32_MAX / 2**16)
    overflow = overflow | (value.abs() + bound > torch.finfo(world.dtype).max)
    return Expected(value, bound, element_nan | row_nan.T[..., None], overflow)


def faults_of(got: torch.Tensor, want: Expected) -> str:
    """What is wrong with an output ``[n, Hq, Dv]``; empty if nothing is."""
    got = got.cpu().double()
    kept = want.nan & ~got.isnan()
    if kept.any():
        where = tuple(kept.nonzero()[0].tolist())
        return f"{got[where]} at {where}, where NaN was seen ({int(kept.sum())} elements)"
    bad = ~got.isfinite() & ~want.nan & ~want.overflow
    if bad.any():
        where = tuple(bad.nonzero()[0].tolist())
        return f"{got[where]} at {where} instead of {want.value[where]} ({int(bad.sum())} elements)"
    off = ((got - want.value).abs() > want.bound) & got.isfinite() & ~want.nan
    if off.any():
        where = tuple(off.nonzero()[0].tolist())
        return (
            f"{got[where]:.9g} at {where} instead of {want.value[where]:.9g}, which may be off by "
            f"{want.bound[where]:.3g} ({int(off.sum())} elements)"
        )
    return ""


class ExpectedPlan(NamedTuple):
    """A decode plan: `WorkList` as Python lists."""

    indptr: list[int]
    sizes: list[int]
    records: list[list[int]]


def expect_plan(lens: list[int], rule: SplitRule) -> ExpectedPlan:
    """The work items of requests of these lengths, as `SplitRule` describes them."""
    chunked = _chunks_are_quicker(lens, rule)
    shift = 0
    while sum(-(-n // (rule.split_tokens(n) << shift)) for n in lens) > rule.most_items:
        shift += 1
    indptr, records = [0], []
    for b, n in enumerate(lens):
        tokens = rule.step if chunked else rule.split_tokens(n) << shift
        starts = range(0, n, tokens)
        records += [[b, s, min(s + tokens, n), int(len(starts) == 1)] for s in starts]
        indptr.append(len(records))
    parts = rule.min_tokens // rule.step if chunked else 1
    return ExpectedPlan(indptr, [len(records), parts], records)


def _chunks_are_quicker(lens: list[int], rule: SplitRule) -> bool:
    chunks = sum(-(-n // rule.step) for n in lens)
    if chunks > rule.most_chunks:
        return False

    def cost(items: int, tokens: int) -> int:
        rounds, rest = divmod(items * rule.heads, rule.programs)
        last = tokens * max(rest, rule.programs * 2 // 3) // rule.programs + 96
        return rounds * (tokens + 96) + (last if rest else 0)

    splits = sum(map(rule.splits, lens))
    coarse = cost(splits, chunks * rule.step // max(splits, 1))
    return cost(chunks, rule.step + rule.step // 16) < coarse
