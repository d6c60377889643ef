"""The hooks act for this backend alone; every other backend keeps the engine's own code."""

from __future__ import annotations

import argparse
import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

# First imported while `arch` is patched, kernels would keep that.
from inkling_backend.attention import flashinfer_extend, triton_path
from inkling_backend.engines.sglang import patches, sizing, versions
from inkling_backend.engines.sglang.flags import Flags, construct, flags_of
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import get_recipe
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.kernels import arch
from inkling_backend.kernels.configs import split_rule


class Args(SimpleNamespace):
    """Arguments under resolution: the record is its own view."""

    def __init__(self, **changes: Any) -> None:
        fields: dict[str, Any] = {"attention_backend": "inkling", "kv_cache_dtype": "auto"}
        fields |= {"prefill_attention_backend": None, "decode_attention_backend": None}
        fields |= {"page_size": None, "device": "cpu", "tp_size": 1, "attn_dp_size": 1}
        super().__init__(**fields | {"attn_cp_size": 1} | changes)


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(
        num_attention_heads=4,
        get_num_kv_heads=lambda tp: 2,
        head_dim=64,
        v_head_dim=64,
        dtype=torch.bfloat16,
    )
    monkeypatch.setattr(versions, "view", lambda args: args)
    monkeypatch.setattr(versions, "set_fields", lambda args, **kw: vars(args).update(kw))
    monkeypatch.setattr(versions, "model_config", lambda args: config)
    monkeypatch.setattr(versions, "model_traits", lambda model: [])
    monkeypatch.setattr(versions, "runs_on_cpu", lambda: True)
    monkeypatch.setattr(versions, "has_host_pools", lambda: True)
    monkeypatch.setattr(versions, "verified_tokens", lambda: 1)
    monkeypatch.setattr(versions, "draft_of", lambda kvc: None)
    monkeypatch.setattr(patches, "verify", lambda: None)


def prepare(args: Args) -> list[Args]:
    calls: list[Args] = []
    patches._prepare(args, calls.append)
    return calls


def test_defaults() -> None:
    args = Args()
    assert prepare(args) == [args]
    assert (args.kv_cache_dtype, args.page_size) == ("mxfp8", 128)
    assert not hasattr(args, "disable_hybrid_swa_memory"), "left to the engine and the user"


def test_drafts_are_chains() -> None:
    args = Args(speculative_algorithm="EAGLE3")
    prepare(args)
    assert (args.speculative_eagle_topk, args.speculative_num_draft_tokens) == (1, 4)


def test_models_with_windows_alone_have_one_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    config = versions.model_config(None)
    for full_layers, one_pool in (([], True), ([3], False), (None, False)):
        monkeypatch.setattr(config, "full_attention_layer_ids", full_layers, raising=False)
        args = Args()
        prepare(args)
        assert getattr(args, "disable_hybrid_swa_memory", False) is one_pool


@pytest.mark.parametrize(
    ("dtype", "tier", "expected"),
    [
        ("nvfp4", True, ("direct", "layer_first")),
        ("nvfp4", False, ("kernel", "page_first")),
        ("bf16", True, ("kernel", "page_first")),
    ],
)
def test_a_host_tier_of_ours_has_one_layout(
    dtype: str, tier: bool, expected: tuple[str, str]
) -> None:
    fields = {"hicache_io_backend": "kernel", "hicache_mem_layout": "page_first"}
    args = Args(kv_cache_dtype=dtype, enable_hierarchical_cache=tier, **fields)
    prepare(args)
    assert (args.hicache_io_backend, args.hicache_mem_layout) == expected


def test_the_host_pool_of_other_pools_is_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    class InklingKVPool:
        pass

    package = "inkling_backend.engines.sglang"
    ours = SimpleNamespace(InklingKVPool=InklingKVPool)
    monkeypatch.setitem(sys.modules, f"{package}.pool", ours)
    host = SimpleNamespace(build=lambda **keywords: ("ours", keywords))
    monkeypatch.setitem(sys.modules, f"{package}.host_pool", host)
    pools = {"ours": InklingKVPool(), "theirs": object()}
    for name, pool in pools.items():
        keywords = {"kv_pool": pool, "page_size": 128}
        built = patches._build_kv_host_pool(lambda **kw: ("theirs", kw), **keywords)
        assert built == (name, keywords)


def test_what_the_user_set_stays() -> None:
    args = Args(kv_cache_dtype="nvfp4", page_size=64)
    prepare(args)
    assert (args.kv_cache_dtype, args.page_size) == ("nvfp4", 64)


def test_other_backends_are_left_alone() -> None:
    args = Args(attention_backend="triton")
    before = dict(vars(args))
    assert prepare(args) == [args]
    assert vars(args) == before


def test_refusal_carries_every_reason() -> None:
    with pytest.raises(UnsupportedError) as error:
        prepare(Args(page_size=1, enable_lmcache=True, speculative_algorithm="DFLASH"))
    assert len(error.value.reasons) == 3


def test_own_options_with_another_backend_are_refused() -> None:
    args = construct(Flags("nvfp4"), lambda: Args(attention_backend="triton"))
    with pytest.raises(UnsupportedError, match="--fp4-kv-cache-recipe nvfp4 needs"):
        prepare(args)


@pytest.mark.parametrize(
    ("backend", "called"), [("inkling", False), ("triton", True), (None, True)]
)
def test_engine_checks_are_skipped_for_this_backend_only(backend: str | None, called: bool) -> None:
    calls: list[Args] = []
    patches._skip(Args(attention_backend=backend), calls.append)
    assert bool(calls) == called


def test_one_phase_is_enough_to_skip() -> None:
    calls: list[Args] = []
    patches._skip(
        Args(attention_backend="triton", decode_attention_backend="inkling"), calls.append
    )
    assert not calls


def test_a_backend_forced_by_the_engine_is_noticed() -> None:
    def force(args: Args) -> None:
        args.attention_backend = "triton"

    with pytest.raises(UnsupportedError, match="triton"):
        patches._confirm(Args(kv_cache_dtype="mxfp8"), force)
    patches._confirm(Args(attention_backend="fa3"), force)
    patches._confirm(Args(kv_cache_dtype="mxfp8"), lambda args: None)


def test_a_cache_dtype_forced_by_the_engine_is_noticed() -> None:
    with pytest.raises(UnsupportedError, match="fp8_e4m3"):
        patches._confirm(
            Args(kv_cache_dtype="mxfp8"), lambda args: vars(args).update(kv_cache_dtype="fp8_e4m3")
        )


def test_engine_keywords() -> None:
    args = patches.build_server_args(
        Args, fp4_kv_cache_recipe="kvfp4", inkling_query_dtype="bf16", page_size=32
    )
    assert (args.kv_cache_dtype, args.page_size) == ("fp4_mx_block16", 32)
    assert flags_of(args) == Flags("kvfp4", "bf16")
    assert not hasattr(args, "fp4_kv_cache_recipe")


def test_command_line() -> None:
    parsed = argparse.Namespace(
        fp4_kv_cache_recipe="nvfp4", inkling_query_dtype="auto", kv_cache_dtype="auto"
    )

    def original(cls: type, args: argparse.Namespace) -> Any:
        return cls(kv_cache_dtype=args.kv_cache_dtype)

    record = patches._from_cli_args(original, Args, parsed)
    assert record.kv_cache_dtype == "nvfp4"
    assert flags_of(record) == Flags("nvfp4")
    assert parsed.kv_cache_dtype == "auto", "the caller's namespace must not change"


def _configurator_on_a_gpu() -> SimpleNamespace:
    """What sizing reads of a ``KVCacheConfigurator``."""
    return SimpleNamespace(
        device="cuda",
        model_config=SimpleNamespace(num_attention_heads=4, context_len=4096),
        model_dtype=torch.bfloat16,
        is_hybrid_swa=False,
    )


def test_workspace_is_kept_out_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "active_attention_tp_size", lambda: 1)
    requests = SimpleNamespace(max_running_requests=8)
    monkeypatch.setattr(versions, "active_server_args", lambda: requests)
    monkeypatch.setattr(arch, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer_extend, "chosen", lambda choice, *_: choice == "flashinfer")
    monkeypatch.setenv("INKLING_EXTEND", "triton")
    recipe = get_recipe("mxfp8")
    layout = CacheLayout(recipe.k, recipe.v, 2, 64, 64)
    kvc = _configurator_on_a_gpu()
    small = sizing.workspace_bytes(kvc, layout, kvc.model_config)
    requests.max_running_requests = 64
    large = sizing.workspace_bytes(kvc, layout, kvc.model_config)
    assert 0 < small < large
    kvc.is_hybrid_swa = True
    second_tables = 2 * 65 * 4096 // 128 * 4
    assert sizing.workspace_bytes(kvc, layout, kvc.model_config) == large + second_tables
    kvc.is_hybrid_swa = False
    monkeypatch.setenv("INKLING_EXTEND", "flashinfer")
    copies = 4096 * 2 * (64 + 64) * 2
    assert sizing.workspace_bytes(kvc, layout, kvc.model_config) > large + copies
    kvc.device = "cpu"
    assert sizing.workspace_bytes(kvc, layout, kvc.model_config) == 0


def test_workspace_of_layers_with_recipes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "active_attention_tp_size", lambda: 1)
    monkeypatch.setattr(arch, "capability_of", lambda device: (8, 0))
    monkeypatch.setenv("INKLING_EXTEND", "triton")
    recipe = get_recipe("nvfp4")
    layout = CacheLayout(recipe.k, recipe.v, 2, 64, 64)
    kvc = _configurator_on_a_gpu()

    def reserved(**flags: Any) -> int:
        requests = SimpleNamespace(max_running_requests=8)
        served = construct(Flags(**flags), lambda: requests)
        monkeypatch.setattr(versions, "active_server_args", lambda: served)
        return sizing.workspace_bytes(kvc, layout, kvc.model_config)

    plain = reserved()
    # The exact kernel, which all recipes have on SM80, splits them alike: nothing is there twice.
    assert reserved(inkling_layer_recipes="0:mxfp8,1:bf16") == plain

    def own_rule(heads: int, layout: CacheLayout, *rest: int) -> Any:
        rule = split_rule(heads, layout, *rest)
        return rule._replace(most_items=rule.most_items + layout.k_format.element_bits)

    monkeypatch.setattr(triton_path, "split_rule", own_rule)
    own = reserved(inkling_layer_recipes="0:mxfp8,1:bf16,2:bf16") - reserved()
    assert plain < own < 3 * plain


class HybridSizer:
    """The engine's sizing of two pools, as in 0.5.23; 0.5.17 has no method for its last step."""

    def __init__(self, full: int, windows: int, ratio: float, draft: int = 0) -> None:
        self._full_layers_num, self._swa_layers_num = full, windows
        self._draft_full_layers_num, self._draft_swa_full_layers_num = draft, 0
        self._swa_full_tokens_ratio = ratio
        self._full_per_token = self._swa_per_token = 100
        self._cell_size = 0.0

    def _recompute_cell_size(self) -> None:
        self._cell_size = self._full_per_token * self._full_layers_num
        self._cell_size += self._swa_full_tokens_ratio * self._swa_per_token * self._swa_layers_num


class OldHybridSizer(HybridSizer):
    _recompute_cell_size = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("dtype", "backend", "own", "ours"),
    [
        ("inkling_mxfp8", "inkling", True, True),
        ("bf16", "inkling", False, True),
        ("bf16", "triton", False, False),
        ("fp8_e4m3", "inkling", False, False),
    ],
)
def test_sizes_of_each_pool(
    dtype: str, backend: str, own: bool, ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = construct(Flags(), SimpleNamespace)
    monkeypatch.setattr(versions, "active_server_args", lambda: served)
    recipe, bf16 = get_recipe("mxfp8"), get_recipe("bf16")
    pool = SimpleNamespace(
        engine_recipe=lambda name: {"bf16": bf16}[name],
        recipe_of=lambda name: recipe if name == "inkling_mxfp8" else None,
        layout_of=lambda recipe, _, page, sinks=0: CacheLayout(
            recipe.k, recipe.v, 1, 64, 64, page, sinks
        ),
    )
    monkeypatch.setitem(sys.modules, "inkling_backend.engines.sglang.pool", pool)
    monkeypatch.setattr(versions, "active_attention_backends", lambda: (backend, backend))
    monkeypatch.setattr(sizing, "workspace_bytes", lambda *_: 7)
    plain = SimpleNamespace(num_hidden_layers=0)
    kvc = SimpleNamespace(kv_cache_dtype_str=dtype, model_config=plain, page_size=128)
    cell = sizing.cell_size(lambda *_: 1000, SimpleNamespace(), kvc, 4)
    assert cell == (4 * 132 if own else 1000)
    sinks = construct(Flags(inkling_sink_tokens=1), SimpleNamespace)
    monkeypatch.setattr(versions, "active_server_args", lambda: sinks)
    cell = sizing.cell_size(lambda *_: 1000, SimpleNamespace(), kvc, 4)
    assert cell == (4 * (132 + 2) if own else 1000), "256 bytes a page of 128 tokens"
    # The second of two ranks: layers 4 to 7.
    kvc.layer_info = SimpleNamespace(start_layer=4, end_layer=8)
    mixed = construct(Flags(inkling_layer_recipes="3:mxfp8,5:nvfp4,7:bf16"), SimpleNamespace)
    monkeypatch.setattr(versions, "active_server_args", lambda: mixed)
    cell = sizing.cell_size(lambda *_: 1000, SimpleNamespace(), kvc, 4)
    assert cell == (2 * 132 + 72 + 256 if own else 1000)
    monkeypatch.setattr(versions, "active_server_args", lambda: served)
    assert sizing.without_workspace(1000, kvc, 3.0) == (993 if ours else 1000)
    assert sizing.without_workspace(3, kvc, 3.0) == (0 if ours else 3)
    served = construct(Flags(inkling_key_transform="center"), SimpleNamespace)
    kvc.model_config = SimpleNamespace(num_hidden_layers=2)
    left = sizing.without_workspace(1000, kvc, 3.0)
    assert left == (1000 - 7 - 2 * 64 * 4 if ours else 1000), "a center of 64 floats a layer"
    monkeypatch.setattr(versions, "active_attention_tp_size", lambda: 1)
    for kind, heads in itertools.product((HybridSizer, OldHybridSizer), (1, 2)):
        kvc.model_config.is_hybrid_swa_compress = heads == 2
        kvc.model_config.get_swa_num_kv_heads = lambda tp, heads=heads: heads
        sizer = kind(2, 10, 0.5)
        sizing.size_two_pools(None, sizer, kvc)
        per_token = (sizer._full_per_token, sizer._swa_per_token)
        assert per_token == ((132, 132 * heads) if own else (100, 100))
        assert sizer._cell_size == (132 * (2 + 5 * heads) if own else 0)


def test_sizes_of_two_pools_where_the_engine_has_no_method_for_it() -> None:
    only_windows, with_draft = OldHybridSizer(0, 10, 0.5), OldHybridSizer(2, 10, 0.5, draft=1)
    versions.set_bytes_per_token(only_windows, 132, 264)
    versions.set_bytes_per_token(with_draft, 132, 264)
    assert only_windows._cell_size == 264 * 10
    assert with_draft._cell_size == 132 * (2 + 1) + 264 * 5


def test_the_engine_adjusts_itself_to_the_model_as_for_triton(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Resolving(Args):
        def _resolved_attention_backends(self) -> tuple[str | None, str | None]:
            return versions.attention_backends(self)

    monkeypatch.setattr(versions, "has_resolution_pipeline", lambda: False)
    seen: list[tuple[str | None, ...]] = []

    def adjust(args: Resolving) -> None:
        seen.append(args._resolved_attention_backends())
        if args.device == "broken":
            raise ValueError("of the engine")

    patches._pass_as_triton(Resolving(), adjust)
    patches._pass_as_triton(Resolving(decode_attention_backend="fa3"), adjust)
    patches._pass_as_triton(Resolving(attention_backend="flashinfer"), adjust)
    with pytest.raises(ValueError, match="of the engine"):
        patches._pass_as_triton(Resolving(device="broken"), adjust)
    assert seen == [("triton",) * 2, ("triton", "fa3"), ("flashinfer",) * 2, ("triton",) * 2]
    assert Resolving()._resolved_attention_backends() == ("inkling", "inkling")
