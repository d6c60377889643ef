"""Pages that go to another process by the pool's descriptions are the same pages there."""

from __future__ import annotations

import ctypes

import pytest
import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, LayerAttention
from inkling_backend.cache import KVCachePool
from inkling_backend.formats import RECIPES, Query
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.reference.store import store

LAYERS, HEADS, DIM, PAGE = 2, 2, 64, 64
TOKENS = 150
# The request's pages on both sides, in the order of its positions.
HERE, THERE = [4, 1, 2], [2, 3, 6]


def make_pool(name: str, pages: int) -> KVCachePool:
    recipe = RECIPES[name]
    layout = CacheLayout(recipe.k, recipe.v, HEADS, DIM, DIM, PAGE)
    pool = KVCachePool(layout, LAYERS, pages, "cpu")
    for buffer in pool.buffers():
        buffer.tensor.view(torch.uint8).fill_(0xFF)
    return pool


def slots(pages: list[int]) -> torch.Tensor:
    return torch.cat([page * PAGE + torch.arange(PAGE) for page in pages])[:TOKENS]


def attend(pool: KVCachePool, pages: list[int], query: torch.Tensor) -> list[torch.Tensor]:
    """Decode one token over each layer."""
    spec = AttentionSpec(2 * HEADS, pool.layout, torch.bfloat16, quantize_query=False)
    runner = AttentionRunner(
        spec, max_batch=1, max_context=256, max_tokens=pool.num_slots, device="cpu"
    )
    table = torch.zeros(1, 256, dtype=torch.int32)
    table[0, :TOKENS] = slots(pages)
    plan = runner.plan_decode(table, torch.tensor([0]), torch.tensor([TOKENS]), 1)
    return [
        runner.run(plan, Query(query), pool.layer(i), torch.empty_like(query), LayerAttention(0.1))
        for i in range(LAYERS)
    ]


def send(source: KVCachePool, target: KVCachePool) -> None:
    """As an engine's transfer does it: by addresses and bytes of a page, K's half, then V's."""
    here, there = source.transfers(), target.transfers()
    half = len(here) // 2
    assert {each.part[0] for each in here[:half]} == {"k"}
    assert {each.part[0] for each in here[half:]} == {"v"}
    for one, other in zip(here, there, strict=True):
        assert one.name == other.name
        size = one.bytes_per_page
        for page, its_page in zip(HERE, THERE, strict=True):
            ctypes.memmove(
                other.tensor.data_ptr() + its_page * size,
                one.tensor.data_ptr() + page * size,
                size,
            )


@pytest.mark.parametrize("recipe", RECIPES)
def test_attention_over_pages_that_were_sent_is_the_same(recipe: str) -> None:
    source, target = make_pool(recipe, 5), make_pool(recipe, 8)
    for i in range(LAYERS):
        k, v = torch.randn(2, TOKENS, HEADS, DIM).bfloat16()
        store(k, v, slots(HERE), source.layer(i))
    query = torch.randn(1, 2 * HEADS, DIM).bfloat16()
    expected = attend(source, HERE, query)
    assert all(out.isfinite().all() for out in expected)
    assert not any(out.isfinite().all() for out in attend(target, THERE, query))
    send(source, target)
    for ours, theirs in zip(attend(target, THERE, query), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_byte_of_the_pool_is_described(recipe: str) -> None:
    pool = make_pool(recipe, 5)
    assert {each.name for each in pool.transfers()} == {each.name for each in pool.buffers()}
    described = sum(each.bytes_per_page for each in pool.transfers()) * pool.num_pages
    assert described == pool.layout.bytes_per_token * LAYERS * pool.num_slots
