"""Chains of drafted tokens: what is asked for, what is refused, and the steps of a draft."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_backend.engines.sglang import patches, sizing, versions
from inkling_backend.engines.sglang.speculation import (
    chain_defaults,
    not_drafted_reasons,
    speculation_reasons,
    tree_words,
    verified_tokens,
)
from inkling_backend.formats import get_recipe
from inkling_backend.formats.layout import CacheLayout

BOTH = ("inkling", "inkling")
MODEL = SimpleNamespace(is_hybrid_swa=False)


def arguments(algorithm: str | None = "EAGLE", **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(speculative_algorithm=algorithm, **changes)


def chain(steps: int) -> dict[str, int]:
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": steps + 1,
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, chain(3)),
        ({"speculative_num_steps": 5}, chain(5)),
        ({"speculative_num_draft_tokens": 8}, chain(7)),
        ({"speculative_eagle_topk": 1, "speculative_num_steps": 2}, chain(2)),
        ({"speculative_eagle_topk": 4, "speculative_num_steps": 2}, {}),
    ],
)
def test_drafts_are_chains_unless_a_tree_is_asked_for(
    given: dict[str, int], expected: dict[str, int]
) -> None:
    assert chain_defaults(arguments("nextn", **given)) == expected
    assert chain_defaults(arguments(None, **given)) == {}
    assert chain_defaults(arguments("NGRAM", **given)) == {}


def test_tokens_that_are_verified() -> None:
    assert verified_tokens(arguments(None, speculative_num_draft_tokens=4)) == 1
    assert verified_tokens(arguments(speculative_num_draft_tokens=4)) == 4


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"enable_dp_attention": True}, "data-parallel"),
        ({"pp_size": 2}, "pipeline"),
        ({"enable_hierarchical_cache": True}, "HiCache"),
        ({"disable_hybrid_swa_memory": False}, "--disable-hybrid-swa-memory"),
    ],
)
def test_what_does_not_go_with_drafts(changes: dict[str, Any], word: str) -> None:
    model = SimpleNamespace(is_hybrid_swa="disable_hybrid_swa_memory" in changes)
    (reason,) = speculation_reasons(arguments(**changes), BOTH, model)
    assert word in reason
    assert speculation_reasons(arguments(None, **changes), BOTH, model) == []


def test_drafts_are_served_by_one_backend() -> None:
    assert speculation_reasons(arguments(pp_size=1), BOTH, MODEL) == []
    (reason,) = speculation_reasons(arguments(), ("triton", "inkling"), MODEL)
    assert "two attention backends" in reason
    one_pool = arguments(disable_hybrid_swa_memory=True)
    assert speculation_reasons(one_pool, BOTH, SimpleNamespace(is_hybrid_swa=True)) == []


def test_what_the_engine_chose_by_itself_is_looked_at() -> None:
    assert not_drafted_reasons(arguments(None)) == []
    assert not_drafted_reasons(arguments("EAGLE", speculative_eagle_topk=1)) == []
    assert not_drafted_reasons(arguments("NGRAM", speculative_eagle_topk=1)) == []
    for algorithm, topk in (("FROZEN_KV_MTP", 1), ("EAGLE", 4)):
        (reason,) = not_drafted_reasons(arguments(algorithm, speculative_eagle_topk=topk))
        assert f"{algorithm} with {topk} candidates" in reason


def test_trees_of_ngrams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INKLING_KERNELS", raising=False)
    one = arguments("NGRAM", speculative_ngram_max_bfs_breadth=1)
    assert speculation_reasons(one, BOTH, MODEL) == []
    broad = arguments("NGRAM", speculative_ngram_max_bfs_breadth=10)
    (reason,) = speculation_reasons(broad, BOTH, MODEL)
    assert "--speculative-ngram-max-bfs-breadth 10" in reason
    monkeypatch.setenv("INKLING_KERNELS", "fa4")
    (reason,) = speculation_reasons(one, BOTH, MODEL)
    assert "INKLING_KERNELS=fa4" in reason


@pytest.mark.parametrize("whole", [True, False])
def test_words_of_the_engines_mask(whole: bool) -> None:
    """The words of two requests; a third pads a graph and is not in the mask."""
    words = torch.tensor([[0b1, 0b11, 0b101], [0b1, 0b11, 0b111]])
    lens = torch.tensor([4, 2, 1])
    parts = []
    for request, old in enumerate([4, 2]):
        new = (words[request][:, None] >> torch.arange(3) & 1).bool()
        past = torch.ones(3, old if whole else 0, dtype=torch.bool)
        parts.append(torch.cat([past, new], 1).flatten())
    got = tree_words(torch.cat(parts), lens, 3, whole=whole)
    assert got.shape == (3, 3)
    assert torch.equal(got[:2], words)


class Backend:
    """What the steps of a draft need of the backend: says what was planned and attended."""

    prefill_attention_backend_str = decode_attention_backend_str = "inkling"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def plan_decode(self, batch: Any, ahead: int) -> None:
        self.calls.append(ahead)

    def forward_decode(self, *args: Any, **kwargs: Any) -> str:
        self.calls.append("attend")
        return "out"

    def init_cuda_graph_state(self, *sizes: int) -> None:
        self.calls.append(sizes)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1


@pytest.fixture
def draft(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module under test, over a stand-in of the engine's base class."""
    package = "inkling_backend.engines.sglang"
    base, backend = ModuleType("base_attn_backend"), ModuleType("backend")
    base.AttentionBackend = object  # type: ignore[attr-defined]
    backend.InklingAttnBackend = Backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.layers.attention.base_attn_backend", base)
    monkeypatch.setitem(sys.modules, f"{package}.backend", backend)
    monkeypatch.delitem(sys.modules, f"{package}.draft", raising=False)
    yield importlib.import_module(f"{package}.draft")
    sys.modules.pop(f"{package}.draft", None)


def test_each_step_plans_once_a_chain_with_one_token_more(draft: ModuleType) -> None:
    backend = Backend()
    steps = draft.DraftSteps(backend, 4)
    assert len(steps.attn_backends) == 3
    for begin in (
        steps.init_forward_metadata,
        steps.init_forward_metadata_out_graph,
        steps.init_forward_metadata_in_graph,
    ):
        backend.calls.clear()
        begin(None)
        for step in steps.attn_backends:
            for _layer in range(2):
                assert step.forward_decode(None, None, None, None, None) == "out"
        assert backend.calls == [each for n in (1, 2, 3) for each in (n, "attend", "attend")]


def test_graphs_of_a_draft_are_as_large_as_the_backends(draft: ModuleType) -> None:
    backend = Backend()
    steps = draft.DraftSteps(backend, 2)
    steps.init_cuda_graph_state(16, 64)
    assert backend.calls == [(16, 64)]
    assert steps.attn_backends[0].get_cuda_graph_seq_len_fill_value() == 1


def test_the_engines_factory_is_asked_for_other_backends_alone(draft: ModuleType) -> None:
    def original(factory: Any) -> str:
        return "the engine's"

    def factory(backend: Any, steps: int) -> SimpleNamespace:
        runner = SimpleNamespace(attn_backend=backend)
        return SimpleNamespace(draft_model_runner=runner, speculative_num_steps=steps)

    ours = Backend()
    made = patches._draft_decode(original, factory(ours, 3))
    assert isinstance(made, draft.DraftSteps)
    assert len(made.attn_backends) == 2
    assert patches._draft_decode(original, factory(ours, 1)) == "the engine's", "it makes none"
    assert patches._draft_decode(original, factory(object(), 3)) == "the engine's"
    assert patches._draft_extend(original, factory(ours, 3)) is ours
    assert patches._draft_extend(original, factory(object(), 3)) == "the engine's"


@pytest.mark.parametrize(("dtype", "ours"), [("inkling_nvfp4", True), ("bf16", False)])
def test_the_draft_is_counted_by_its_own_heads(
    dtype: str, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = get_recipe("nvfp4")
    pool = SimpleNamespace(
        engine_recipe=lambda name: get_recipe("bf16"),
        recipe_of=lambda name: recipe if name == "inkling_nvfp4" else None,
        layout_of=lambda recipe, heads, *_: CacheLayout(recipe.k, recipe.v, heads, 64, 64),
    )
    monkeypatch.setitem(sys.modules, "inkling_backend.engines.sglang.pool", pool)
    monkeypatch.setattr(versions, "active_attention_backends", lambda: BOTH)
    monkeypatch.setattr(versions, "active_server_args", SimpleNamespace)
    kvc = SimpleNamespace(
        kv_cache_dtype_str=dtype,
        model_config=4,
        page_size=128,
        layer_info=SimpleNamespace(num_effective_layers=10),
    )
    sizer = SimpleNamespace(_cell_size=1)
    sizer._compute_cell_size = lambda kvc, layers: sizing.cell_size(
        lambda *_: 0, sizer, kvc, layers
    )
    monkeypatch.setattr(versions, "draft_of", lambda kvc: None)
    sizing.add_draft(None, sizer, kvc)
    assert sizer._cell_size == 1, "without a draft the engine's sum stays"
    monkeypatch.setattr(versions, "draft_of", lambda kvc: (1, 2))
    sizing.add_draft(None, sizer, kvc)
    token = 2 * 64 * 4.5 / 8  # of one KV head: K and V at 4.5 bits
    assert sizer._cell_size == (4 * token * 10 + token * 2 if ours else 1)


@pytest.mark.parametrize("known", [True, False])
def test_the_draft_of_a_target(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.23 keeps its configuration; 0.5.17 counts its layers alone."""
    made = SimpleNamespace(
        ModelConfig=SimpleNamespace(from_server_args=lambda arguments, **keywords: keywords)
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.configs.model_config", made)
    aux = SimpleNamespace(eagle_draft_num_layers=1)
    if known:
        aux.draft_model_config = "configuration"
    algorithm = SimpleNamespace(is_eagle=lambda: False, is_standalone=lambda: True)
    kvc = SimpleNamespace(
        spec_algorithm=algorithm,
        spec_aux_config=aux,
        is_draft_worker=False,
        server_args=SimpleNamespace(
            speculative_draft_model_path="draft", speculative_draft_model_revision="main"
        ),
    )
    built = {"model_path": "draft", "model_revision": "main", "is_draft_model": True}
    assert versions.draft_of(kvc) == ("configuration" if known else built, 1)
    kvc.is_draft_worker = True
    assert versions.draft_of(kvc) is None
    kvc.is_draft_worker, aux.eagle_draft_num_layers = False, None
    assert versions.draft_of(kvc) is None
    aux.eagle_draft_num_layers, algorithm.is_standalone = 1, lambda: False
    assert versions.draft_of(kvc) is None


def test_workspaces_of_both_models_are_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = CacheLayout(get_recipe("mxfp8").k, get_recipe("mxfp8").v, 2, 64, 64)
    flags = SimpleNamespace(centers_keys=True)
    monkeypatch.setattr(sizing, "_layout", lambda kvc: (layout, True))
    monkeypatch.setattr(sizing, "_draft_layout", lambda kvc, config: layout)
    monkeypatch.setattr(sizing, "flags_of", lambda arguments: flags)
    monkeypatch.setattr(versions, "active_server_args", lambda: None)
    monkeypatch.setattr(versions, "draft_of", lambda kvc: ("draft", 1))
    monkeypatch.setattr(
        sizing, "workspace_bytes", lambda kvc, layout, model: 5 if model == "draft" else 7
    )
    kvc = SimpleNamespace(model_config=SimpleNamespace(num_hidden_layers=3))
    centers = layout.center_bytes * (3 + 1)
    assert sizing.without_workspace(10**6, kvc, None) == 10**6 - 7 - 5 - centers


def test_more_tokens_to_verify_take_more_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    from inkling_backend.kernels import arch

    monkeypatch.setattr(versions, "active_attention_tp_size", lambda: 1)
    monkeypatch.setattr(
        versions, "active_server_args", lambda: SimpleNamespace(max_running_requests=8)
    )
    monkeypatch.setattr(arch, "capability_of", lambda device: (9, 0))
    monkeypatch.setenv("INKLING_EXTEND", "triton")
    model = SimpleNamespace(num_attention_heads=4, context_len=4096)
    kvc = SimpleNamespace(
        device="cuda", model_config=model, model_dtype=torch.bfloat16, is_hybrid_swa=False
    )
    layout = CacheLayout(get_recipe("mxfp8").k, get_recipe("mxfp8").v, 2, 64, 64)
    sizes = []
    for tokens in (1, 4):
        monkeypatch.setattr(versions, "verified_tokens", lambda tokens=tokens: tokens)
        sizes.append(sizing.workspace_bytes(kvc, layout, model))
    assert sizes[0] < sizes[1]
