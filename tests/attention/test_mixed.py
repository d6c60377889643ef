"""Layers of several layouts: each has the bits that a runner of its own would give it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, MixedRunner, triton_path
from inkling_backend.cache import KVCachePool
from inkling_backend.formats import Query, get_recipe
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.kernels.configs import SplitRule, split_rule
from tests.attention.world import PLAIN, World, make_world, slots_of

RECIPES = ("nvfp4", "mxfp8", "bf16")
LENS, NEW = [300, 40], [3, 40]
SIZES: dict[str, Any] = {"max_batch": 4, "max_context": 1024, "max_tokens": 1024}


def make_layers(device: torch.device) -> tuple[World, AttentionSpec, list[LayerCache]]:
    """A world of the first recipe, and a layer of each with the same tokens in the same slots."""
    world = make_world(LENS, device, k=RECIPES[0])
    layouts = [world.layout.with_recipe(get_recipe(name)) for name in RECIPES]
    others = dict(enumerate(layouts))
    pool = KVCachePool(world.layout, len(RECIPES), world.cache.num_pages, device, others=others)
    spec = AttentionSpec(world.num_q_heads, world.layout, world.dtype, quantize_query=False)
    return world, spec, [pool.layer(i) for i in range(len(RECIPES))]


@dataclass
class Inputs:
    """Rows of one layer."""

    k: torch.Tensor
    v: torch.Tensor
    prefill: Query
    decode: Query


def make_inputs(world: World) -> Inputs:
    k, v = torch.randn(2, sum(LENS), 2, 64, dtype=world.dtype, device=world.device)
    return Inputs(k, v, world.queries(sum(NEW)), world.queries(len(LENS)))


def run_all(
    runner: AttentionRunner, world: World, caches: list[LayerCache], inputs: list[Inputs]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A prefill and then a decode of every request, in each layer: their outputs."""
    slots = torch.cat([slots_of(world, b) for b in range(len(LENS))])
    indptr = torch.tensor([0, *NEW], device=world.device).cumsum(0).int()
    extend = runner.plan_extend(world.slot_table, world.rows, world.seq_lens, indptr, NEW, LENS)
    decode = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, len(LENS))
    found = []
    for cache, rows in zip(caches, inputs, strict=True):
        runner.store(cache, rows.k, rows.v, slots)
        outs = world.empty_out(sum(NEW)), world.empty_out(len(LENS))
        runner.run(extend, rows.prefill, cache, outs[0], PLAIN)
        runner.run(decode, rows.decode, cache, outs[1], PLAIN)
        found.append(outs)
    return found


def own_rule(sizes: int, layout: CacheLayout, *rest: int) -> SplitRule:
    """As `decode_fast` may have it: another split of the work for another format."""
    rule = split_rule(sizes, layout, *rest)
    return rule._replace(most_items=rule.most_items + layout.k_format.element_bits)


@pytest.mark.parametrize("kernels", ["reference", "triton", "triton, split by layout"])
def test_layers_have_the_bits_of_a_runner_of_their_own(
    kernels: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_KERNELS", kernels.partition(",")[0])
    if "split" in kernels:
        monkeypatch.setattr(triton_path, "split_rule", own_rule)
    world, spec, caches = make_layers(device)
    mixed = MixedRunner(spec, [cache.layout for cache in caches], device=device, **SIZES)
    inputs = [make_inputs(world) for _ in caches]
    got = run_all(mixed, world, caches, inputs)
    for i, cache in enumerate(caches):
        alone = AttentionRunner(replace(spec, layout=cache.layout), device=device, **SIZES)
        (want,) = run_all(alone, world, [cache], [inputs[i]])
        for mine, its in zip(got[i], want, strict=True):
            assert torch.isfinite(mine).all()
            assert torch.equal(mine, its)


def test_what_no_layout_changes_is_there_once(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type == "cuda":
        pytest.skip("what is chosen there depends on the GPU")
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    world, spec, caches = make_layers(device)
    layouts = [cache.layout for cache in caches]
    single = AttentionRunner(spec, device=device, **SIZES)
    mixed = MixedRunner(spec, layouts, device=device, **SIZES)
    assert mixed.workspace_bytes == single.workspace_bytes
    assert mixed.kernels == single.kernels
    plan = mixed.plan_decode(world.slot_table, world.rows, world.seq_lens, 2)
    assert not plan.others, "one plan for all of them"

    monkeypatch.setattr(triton_path, "split_rule", own_rule)
    mixed = MixedRunner(spec, layouts, device=device, **SIZES)
    plan = mixed.plan_decode(world.slot_table, world.rows, world.seq_lens, 2)
    assert plan.others is not None
    assert set(plan.others) == set(layouts[1:])
    apart = [AttentionRunner(replace(spec, layout=x), device=device, **SIZES) for x in layouts]
    tables = 4 * (4 * 16 + 4 + 5)  # pages, lengths and offsets of extend
    saved = sum(runner.workspace_bytes for runner in apart) - mixed.workspace_bytes
    assert saved == (len(layouts) - 1) * tables


def test_one_layout_needs_no_other_runner(device: torch.device) -> None:
    world, spec, caches = make_layers(device)
    mixed = MixedRunner(spec, [spec.layout] * 3, device=device, **SIZES)
    single = AttentionRunner(spec, device=device, **SIZES)
    inputs = [make_inputs(world)]
    (got,), (want,) = (run_all(r, world, caches[:1], inputs) for r in (mixed, single))
    assert all(map(torch.equal, got, want))
    assert mixed.workspace_bytes == single.workspace_bytes
