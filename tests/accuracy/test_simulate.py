"""A simulated cache gives attention what the engine's pages would."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_backend.accuracy.errors import AccuracyError
from inkling_backend.accuracy.settings import parse
from inkling_backend.accuracy.simulate import CacheSimulation
from inkling_backend.accuracy.subject import Subject
from inkling_backend.cache import KVCachePool
from inkling_backend.formats import RECIPES
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.reference.gather import gather
from inkling_backend.reference.store import store
from inkling_backend.transforms import KeyTransform, center_of

IDS = torch.arange(40) * 7 % 120
LAYER = SimpleNamespace(layer_idx=0, num_key_value_groups=2, is_causal=True)


def qkv(tokens: int = 40) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(tokens, heads, 64).bfloat16() for heads in (4, 2, 2))
    return q, k, v


@pytest.mark.parametrize("name", RECIPES)
def test_rows_are_those_of_the_pages(name: str) -> None:
    recipe, (q, k, v) = parse(name).recipe, qkv()
    layout = CacheLayout(recipe.k, recipe.v, 2, 64, 64)
    cache = KVCachePool(layout, 1, 2, "cpu").layer(0)
    slots = torch.arange(128, 168)
    query = store(k, v, slots, cache, q=q, quantize_q=recipe.quantize_query)
    assert query is not None
    seen_q, seen_k, seen_v = CacheSimulation(parse(name)).read_back(0, q, k, v)
    assert torch.equal(seen_q, query.dequantize())
    assert torch.equal(seen_k, gather(slots, cache, "k").float())
    assert torch.equal(seen_v, gather(slots, cache, "v").float())


def test_transforms_go_before_the_format() -> None:
    q, k, v = qkv()
    simulation = CacheSimulation(parse("bf16+center+rotate"))
    seen_q, seen_k, seen_v = simulation.read_back(0, q, k, v)
    transform = KeyTransform(center_of(k), True)
    assert torch.equal(seen_k, transform.key(k).bfloat16().float())
    assert torch.equal(seen_q, transform.query(q).bfloat16().float())
    assert torch.equal(seen_v, v.float())
    again = simulation.read_back(0, q, k + 9, v)[1]
    assert torch.equal(again, transform.key(k + 9).bfloat16().float())


def test_a_layer_is_read_in_its_own_recipe() -> None:
    q, k, v = qkv()
    mixed = CacheSimulation(parse("nvfp4+layers(1:mxfp8-nvfp4)"))
    for layer, name in ((0, "nvfp4"), (1, "mxfp8-nvfp4")):
        got = mixed.read_back(layer, q, k, v)
        want = CacheSimulation(parse(name)).read_back(layer, q, k, v)
        assert all(map(torch.equal, got, want))


def test_sinks_are_exact() -> None:
    q, k, v = qkv()
    _, seen_k, seen_v = CacheSimulation(parse("nvfp4+sinks4")).read_back(0, q, k, v)
    for seen, rows in ((seen_k, k), (seen_v, v)):
        assert torch.equal(seen[:4], rows[:4].float())
        assert not torch.equal(seen[4:], rows[4:].float())


def call(name: str, **kwargs: Any) -> CacheSimulation:
    simulation = CacheSimulation(parse(name))
    q, k, v = (x.transpose(0, 1)[None].float() for x in qkv())
    simulation.attend(LAYER, q, k, v, None, scaling=0.125, **kwargs)
    return simulation


def test_errors_of_every_layer_and_head() -> None:
    simulation = call("nvfp4")
    (heads,) = simulation.relative_errors()
    assert len(heads) == 4
    assert all(0.01 < error < 0.5 for error in heads)
    simulation.forget_errors()
    assert simulation.relative_errors() == []
    assert max(call("mxfp8_q_bf16").relative_errors()[0]) < min(heads)


@pytest.mark.parametrize("keyword", ["softcap", "s_aux"])
def test_attention_that_is_not_simulated(keyword: str) -> None:
    with pytest.raises(AccuracyError, match=keyword):
        call("mxfp8", **{keyword: 30.0})
    call("mxfp8", **{keyword: None})


def test_only_one_whole_sequence() -> None:
    q, k, v = (x.transpose(0, 1)[None].float() for x in qkv())
    with pytest.raises(AccuracyError, match="cache"):
        CacheSimulation(parse("mxfp8")).attend(LAYER, q[:, :, -1:], k, v, None)


def test_a_model_runs_over_the_setting_it_is_given(subject: Subject) -> None:
    plain, coarse = (CacheSimulation(parse(name)) for name in ("bf16", "mxfp4_block32"))
    first, other = subject.logits(IDS, plain), subject.logits(IDS, coarse)
    assert first.shape == (40, 120)
    assert not torch.equal(first, other)
    assert torch.equal(first, subject.logits(IDS, plain))
    assert [len(heads) for heads in coarse.relative_errors()] == [4, 4]
    torch.testing.assert_close(subject.logits(IDS, plain, last=3), first[-3:])


def test_the_future_stays_unseen(subject: Subject) -> None:
    simulation = CacheSimulation(parse("nvfp4"))
    changed = IDS.clone()
    changed[-1] = 5
    whole, other = subject.logits(IDS, simulation), subject.logits(changed, simulation)
    torch.testing.assert_close(whole[:-1], other[:-1])
    assert not torch.equal(whole[-1], other[-1])
