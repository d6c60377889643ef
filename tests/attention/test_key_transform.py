"""Centered and rotated keys: attention is what it was, its error is not, in every recipe."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, LayerAttention
from inkling_backend.cache import KVCachePool
from inkling_backend.formats import get_recipe
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.transforms import center_of

PAGE, TOKENS, NEW, HEADS, GROUP, DIM = 32, 70, 5, 2, 2, 64
LAYER = LayerAttention(DIM**-0.5)
# What an offset of K may cost with centering (its goal), and what it costs without, at least.
GOAL, WITHOUT = 1.5, 4.0


def rows(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K, V and Q; few tokens have most of the weight, as in a model."""
    k, v = torch.randn(TOKENS, HEADS, DIM), torch.randn(TOKENS, HEADS, DIM)
    q = 2 * torch.randn(NEW, HEADS * GROUP, DIM)
    return k.to(device), v.to(device), q.bfloat16().to(device)


def offset(device: torch.device) -> torch.Tensor:
    """Hundreds of times the spread of the keys, in a few channels."""
    shift = torch.zeros(HEADS, DIM)
    shift[:, ::13] = torch.randn(HEADS, 5) * 500
    return shift.to(device)


def exact(k: torch.Tensor, v: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last rows in float64."""
    k, v = (x.double().repeat_interleave(GROUP, dim=1) for x in (k, v))
    logits = torch.einsum("nhd,thd->hnt", q.double(), k) * LAYER.sm_scale
    hidden = torch.arange(TOKENS) > (TOKENS - NEW + torch.arange(NEW))[:, None]
    p = logits.masked_fill(hidden.to(k.device), -torch.inf).softmax(-1)
    return torch.einsum("hnt,thd->nhd", p, v)


def served(
    recipe_name: str,
    k: torch.Tensor,
    v: torch.Tensor,
    q: torch.Tensor,
    *,
    centers: bool,
    rotates: bool,
    quantize_query: bool = False,
) -> torch.Tensor:
    """The same through a runner: a prefill whose last token is decoded alone, too."""
    recipe, device = get_recipe(recipe_name), k.device
    layout = CacheLayout(recipe.k, recipe.v, HEADS, DIM, DIM, PAGE)
    pages = -(-TOKENS // PAGE)
    pool = KVCachePool(layout, 1, 1 + pages, device, centers=centers, rotates=rotates)
    cache = pool.layer(0)
    for scale in (pool.k_global, pool.v_global):
        if scale is not None:
            # As large as the values ask for: the one the engine has does not fit the offset.
            scale.fill_(float(k.abs().max()) / (6 * 448))
    if centers:
        assert cache.k_center is not None
        cache.k_center.copy_(center_of(k))
    spec = AttentionSpec(HEADS * GROUP, layout, q.dtype, quantize_query)
    runner = AttentionRunner(
        spec, max_batch=2, max_context=pages * PAGE, max_tokens=pages * PAGE, device=device
    )
    slots = torch.arange(PAGE, PAGE + TOKENS, device=device)
    table = torch.arange(PAGE, (1 + pages) * PAGE, dtype=torch.int32, device=device)[None]
    first, length = torch.zeros(1, dtype=torch.int64, device=device), slots.new_tensor([TOKENS])
    runner.store(cache, k[:-NEW], v[:-NEW], slots[:-NEW])
    query = runner.store(cache, k[-NEW:], v[-NEW:], slots[-NEW:], q)
    plan = runner.plan_extend(table, first, length, slots.new_tensor([0, NEW]), [NEW], [TOKENS])
    out = runner.run(plan, query, cache, torch.empty_like(q), LAYER)
    # A query whose keys are stored already is the same query.
    assert torch.equal(runner.query(cache, q).data, query.data)
    decode = runner.plan_decode(table, first, length, 1)
    last = runner.query(cache, q[-1:])
    alone = runner.run(decode, last, cache, torch.empty_like(q[-1:]), LAYER)
    torch.testing.assert_close(alone, out[-1:], rtol=0.05, atol=0.02)
    return out.double()


def error(recipe: str, k: torch.Tensor, v: torch.Tensor, q: torch.Tensor, **how: bool) -> float:
    """Of the output, over its size."""
    want = exact(k, v, q)
    return float((served(recipe, k, v, q, **how) - want).norm() / want.norm())


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-nvfp4", "nvfp4", "kvfp4", "mxfp4"])
def test_an_offset_of_the_keys_costs_little(
    recipe: str, implementation: str, device: torch.device
) -> None:
    """With a center, rotated too or not, and much without one."""
    k, v, q = rows(device)
    plain = error(recipe, k, v, q, centers=False, rotates=False)
    shifted = k + offset(device)
    for rotates in (False, True):
        assert error(recipe, shifted, v, q, centers=True, rotates=rotates) <= GOAL * plain
    assert error(recipe, shifted, v, q, centers=False, rotates=False) > WITHOUT * plain


@pytest.mark.parametrize("quantize_query", [False, True])
@pytest.mark.parametrize("centers", [False, True])
def test_queries_turn_with_the_keys(
    centers: bool, quantize_query: bool, implementation: str, device: torch.device
) -> None:
    k, v, q = rows(device)
    plain = error("mxfp8", k, v, q, centers=False, rotates=False, quantize_query=quantize_query)
    how = {"centers": centers, "rotates": True, "quantize_query": quantize_query}
    assert error("mxfp8", k, v, q, **how) <= GOAL * plain
