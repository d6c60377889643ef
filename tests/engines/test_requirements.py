"""Every refusal of the SGLang backend is provoked, all reasons come at once, and nothing else is
refused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from inkling_backend.attention import LayerAttention
from inkling_backend.engines.sglang import versions
from inkling_backend.engines.sglang.flags import KV_CACHE_DTYPES, Flags
from inkling_backend.engines.sglang.layer import layer_attention
from inkling_backend.engines.sglang.requirements import (
    argument_reasons,
    center_reasons,
    environment_reasons,
    flag_reasons,
    layer_reasons,
    takes_whole_prompts,
)
from inkling_backend.formats import get_format, get_recipe
from inkling_backend.formats.layout import CacheLayout

BOTH = ("inkling", "inkling")


def arguments(**changes: Any) -> SimpleNamespace:
    fields = {"kv_cache_dtype": "mxfp8", "page_size": 128, "device": "cuda", "dcp_size": 1}
    fields |= {"disaggregation_mode": "null", "speculative_algorithm": None, "kv_canary": "none"}
    return SimpleNamespace(**fields | changes)


def model(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "attention_arch": SimpleNamespace(name="MHA"),
        "num_attention_heads": 8,
        "get_num_kv_heads": lambda tp: max(1, 2 // tp),
        "head_dim": 128,
        "v_head_dim": 128,
        "dtype": torch.bfloat16,
        "is_encoder_decoder": False,
        "is_hybrid_swa": False,
        "attention_chunk_size": None,
        "has_attention_sinks": False,
        "hf_text_config": SimpleNamespace(),
    }
    return SimpleNamespace(**fields | changes)


def reasons(
    args: SimpleNamespace | None = None,
    flags: Flags | None = None,
    backends: tuple[str | None, str | None] = BOTH,
    config: SimpleNamespace | None = None,
    **context: Any,
) -> list[str]:
    return argument_reasons(
        args or arguments(),
        flags or Flags(),
        backends,
        config or model(),
        **{"capability": (9, 0)} | context,
    )


@pytest.mark.parametrize("dtype", KV_CACHE_DTYPES)
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_supported(dtype: str, page_size: int) -> None:
    assert reasons(arguments(kv_cache_dtype=dtype, page_size=page_size)) == []


@pytest.mark.parametrize(
    ("device", "kernels", "interpret", "words"),
    [
        ("cuda", "auto", False, ""),
        ("cpu", "auto", False, ""),
        ("cuda", "reference", True, ""),
        ("cpu", "triton", True, ""),
        ("cuda", "auto", True, "TRITON_INTERPRET is set"),
        ("cpu", "triton", False, "needs TRITON_INTERPRET=1"),
        ("cpu", "cuda", False, "INKLING_KERNELS='cuda'"),
        ("cuda", "fa4", False, "INKLING_KERNELS=fa4 cannot be had from this SGLang"),
    ],
)
def test_kernels_of_the_environment(
    device: str, kernels: str, interpret: bool, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_KERNELS", kernels)
    monkeypatch.setattr(triton.knobs.runtime, "interpret", interpret)
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention", None)
    found = environment_reasons(device)
    assert len(found) == bool(words)
    assert words in "".join(found)


def test_fa4_is_refused_before_weights_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "fa4")
    flags = Flags(inkling_query_dtype="bf16")
    found = " ".join(reasons(flags=flags, capability=(9, 0)))
    assert "not on 9.0" in found
    assert "Q is torch.bfloat16" in found


def test_a_broken_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INKLING_KERNELS", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    (reason,) = environment_reasons("cuda")
    assert "Triton cannot be imported" in reason
    assert environment_reasons("cpu") == []


def test_cpu_is_supported() -> None:
    assert reasons(arguments(device="cpu"), capability=None) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"page_size": 16}, "page size 16 128"),
        ({"page_size": 1}, "page size 1 "),
        ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3 mxfp8 nvfp4 fp4_mx_block16 bf16"),
        ({"speculative_algorithm": "dflash"}, "--speculative-algorithm"),
        ({"speculative_eagle_topk": 4}, "--speculative-eagle-topk"),
        ({"enable_multi_layer_eagle": True}, "--enable-multi-layer-eagle"),
        ({"speculative_adaptive": True}, "--speculative-adaptive"),
        ({"speculative_draft_attention_backend": "fa3"}, "--speculative-draft-attention-backend"),
        ({"speculative_draft_kv_cache_dtype": "bf16"}, "--speculative-draft-kv-cache-dtype"),
        ({"speculative_draft_window_size": 512}, "--speculative-draft-window-size"),
        ({"hicache_storage_backend": "file"}, "--hicache-storage-backend"),
        ({"enable_lmcache": True}, "LMCache"),
        ({"disaggregation_mode": "decode"}, "disaggregation"),
        ({"dcp_size": 2}, "--dcp-size"),
        ({"attn_cp_size": 2}, "--attn-cp-size"),
        ({"enable_kv_cache_sharding": True}, "sharding"),
        ({"enable_unified_memory": True}, "unified memory"),
        ({"enable_hisparse": True}, "HiSparse"),
        ({"enable_page_major_kv_layout": True}, "page-major"),
        ({"enable_two_batch_overlap": True}, "two-batch"),
        ({"enable_pdmux": True}, "multiplexing"),
        ({"dllm_algorithm": "x"}, "diffusion"),
        ({"kv_canary": "log"}, "canary"),
        ({"device": "npu"}, "npu"),
        (
            {"device": "cpu", "enable_deterministic_inference": True},
            "--enable-deterministic-inference needs a GPU",
        ),
        ({"enable_torch_compile": True}, "--enable-torch-compile"),
        (
            {"cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="full"))},
            "--cuda-graph-backend-prefill full",
        ),
    ],
)
def test_unsupported_arguments(changes: dict[str, Any], words: str) -> None:
    (reason,) = reasons(arguments(**changes))
    assert all(word in reason for word in words.split()), reason


def test_layers_with_a_window_may_have_kv_heads_of_their_own_in_a_pool_of_their_own() -> None:
    fields = {"get_swa_num_kv_heads": lambda tp: 4, "is_hybrid_swa_compress": True}
    assert reasons(config=model(**fields, is_hybrid_swa=True)) == []
    one_pool = arguments(disable_hybrid_swa_memory=True)
    (reason,) = reasons(one_pool, config=model(**fields, is_hybrid_swa=True))
    assert "KV heads of their own (4 instead of 2)" in reason
    # As many as the group allows, in both kinds of layers.
    fields["get_swa_num_kv_heads"] = lambda tp: 3
    (reason,) = reasons(config=model(**fields, is_hybrid_swa=True))
    assert "8 query heads are no multiple of 3 KV heads" in reason


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attention_arch": SimpleNamespace(name="MLA")}, "MLA"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"swa_head_dim": 64, "swa_v_head_dim": 64}, "64 and 64 instead of 128 and 128"),
        ({"get_swa_num_kv_heads": lambda tp: 4}, "KV heads of their own (4 instead of 2)"),
        ({"attention_chunk_size": 8192}, "chunked local"),
        ({"head_dim": 80, "v_head_dim": 80}, "head_dim 80"),
        ({"head_dim": 512, "v_head_dim": 512}, "head_dim 512"),
        ({"dtype": torch.float32}, "float32"),
    ],
)
def test_unsupported_models(changes: dict[str, Any], word: str) -> None:
    (reason,) = reasons(config=model(**changes))
    assert word in reason


def test_models_with_windows_sinks_and_soft_caps_are_supported() -> None:
    text = SimpleNamespace(attn_logit_softcapping=50.0)
    config = model(is_hybrid_swa=True, has_attention_sinks=True, hf_text_config=text)
    assert reasons(config=config) == []


def test_mla_is_one_reason_whatever_its_head_dims_are() -> None:
    config = model(attention_arch=SimpleNamespace(name="MLA"), head_dim=576, v_head_dim=512)
    (reason,) = reasons(config=config)
    assert "MLA" in reason


def test_head_dim_depends_on_the_recipe() -> None:
    config = model(head_dim=80, v_head_dim=80)
    assert reasons(arguments(kv_cache_dtype="nvfp4"), config=config) == []
    assert "mxfp8" in reasons(config=config)[0]


def test_old_gpu_and_no_gpu() -> None:
    assert "7.5" in reasons(capability=(7, 5))[0]
    assert reasons(capability=(8, 0)) == []
    assert "none was found" in reasons(capability=None)[0]


def test_engine_that_cannot_page_on_cpu() -> None:
    (reason,) = reasons(arguments(device="cpu"), capability=None, cpu_supported=False)
    assert "0.5.23" in reason


def test_a_host_tier() -> None:
    args = arguments(enable_hierarchical_cache=True)
    assert reasons(args) == []
    (reason,) = reasons(args, host_tier_supported=False)
    assert "0.5.23" in reason
    assert reasons(host_tier_supported=False) == []
    windows = model(is_hybrid_swa=True)
    (reason,) = reasons(args, config=windows)
    assert "--disable-hybrid-swa-memory" in reason
    one_pool = arguments(enable_hierarchical_cache=True, disable_hybrid_swa_memory=True)
    assert reasons(one_pool, config=windows) == []


def test_kinds_of_model_that_the_engine_names() -> None:
    (reason,) = reasons(traits=["hybrid linear-attention layers"])
    assert "hybrid linear-attention layers" in reason


def test_conflict_names_both() -> None:
    (reason,) = reasons(arguments(kv_cache_dtype="mxfp8"), Flags("nvfp4"))
    assert "--fp4-kv-cache-recipe nvfp4" in reason
    assert "--kv-cache-dtype mxfp8" in reason
    assert reasons(arguments(kv_cache_dtype="fp4_mx_block16"), Flags("kvfp4")) == []


@pytest.mark.parametrize("backends", [("inkling", "fa3"), ("fa3", "inkling"), (None, "inkling")])
def test_other_backends_read_bf16_only(backends: tuple[str | None, str | None]) -> None:
    (reason,) = reasons(backends=backends)
    assert "--kv-cache-dtype bf16" in reason
    assert (backends[0] if backends[1] == "inkling" else backends[1]) or "default" in reason
    assert reasons(arguments(kv_cache_dtype="bf16"), backends=backends) == []


@pytest.mark.parametrize("name", ["SGLANG_USE_HND_KVCACHE", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"])
def test_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    (reason,) = reasons()
    assert name in reason


def test_all_reasons_at_once() -> None:
    found = reasons(
        arguments(page_size=16, enable_lmcache=True, speculative_algorithm="DFLASH"),
        Flags("kvfp4"),
        ("inkling", "triton"),
        model(is_encoder_decoder=True, head_dim=72, v_head_dim=72),
        capability=(7, 0),
    )
    text = "\n".join(found)
    words = ("page size", "LMCache", "speculative", "conflicts", "triton", "encoder", "72", "7.0")
    assert all(word in text for word in words), text
    assert len(found) == len(words)


@pytest.mark.parametrize("dtype", ["mxfp8", "mxfp8-nvfp4", "nvfp4", "fp4_mx_block16", "bf16"])
def test_queries_in_mxfp8_need_keys_in_mxfp8(dtype: str) -> None:
    found = reasons(arguments(kv_cache_dtype=dtype), Flags(inkling_query_dtype="mxfp8"))
    if dtype.startswith("mxfp8"):
        assert found == []
    else:
        (reason,) = found
        assert "--inkling-query-dtype mxfp8" in reason
        assert f"--kv-cache-dtype is {dtype}" in reason


def test_a_bf16_cache_gains_nothing_from_a_transform() -> None:
    flags = Flags(inkling_key_transform="rotate")
    assert reasons(arguments(kv_cache_dtype="nvfp4"), flags) == []
    (reason,) = reasons(arguments(kv_cache_dtype="bf16"), flags)
    assert "--inkling-key-transform rotate" in reason
    (reason,) = flag_reasons(flags, ("triton", "triton"), "auto")
    assert "--inkling-key-transform rotate needs --attention-backend inkling" in reason


@pytest.mark.parametrize("dtype", ["mxfp8", "mxfp8-nvfp4", "nvfp4", "fp4_mx_block16", "bf16"])
def test_four_over_six_needs_nvfp4(dtype: str) -> None:
    flags = Flags(inkling_nvfp4_scale="fouroversix")
    found = reasons(arguments(kv_cache_dtype=dtype), flags)
    if "nvfp4" in dtype:
        assert found == []
    else:
        (reason,) = found
        assert "--inkling-nvfp4-scale fouroversix" in reason
        assert f"--kv-cache-dtype is {dtype}" in reason
    (reason,) = flag_reasons(flags, ("triton", "triton"), "auto")
    assert "--inkling-nvfp4-scale fouroversix needs --attention-backend inkling" in reason


def test_layers_with_recipes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    nvfp4 = arguments(kv_cache_dtype="nvfp4")
    served = Flags(inkling_layer_recipes="0-1:mxfp8,31:bf16")
    llama = model(num_hidden_layers=32)
    assert reasons(nvfp4, served, config=llama) == []
    (reason,) = reasons(nvfp4, served, config=model(num_hidden_layers=31))
    assert "names layer 31, but the model has layers 0 to 30" in reason
    (reason,) = reasons(arguments(kv_cache_dtype="bf16"), served, config=llama)
    assert "take a recipe of fewer bits" in reason
    quantized = Flags(inkling_layer_recipes="31:nvfp4", inkling_query_dtype="mxfp8")
    (reason,) = reasons(arguments(), quantized, config=llama)
    assert "K in MXFP8 in every layer" in reason
    windows = model(num_hidden_layers=32, is_hybrid_swa=True)
    (reason,) = reasons(nvfp4, served, config=windows)
    assert "set --disable-hybrid-swa-memory" in reason
    one_pool = arguments(kv_cache_dtype="nvfp4", disable_hybrid_swa_memory=True)
    assert reasons(one_pool, served, config=windows) == []
    drafts = arguments(kv_cache_dtype="nvfp4", speculative_algorithm="EAGLE")
    assert any("with a draft model" in reason for reason in reasons(drafts, served, config=llama))
    narrow = model(num_hidden_layers=32, head_dim=80, v_head_dim=80)
    (reason,) = reasons(nvfp4, served, config=narrow)
    assert "head_dim 80 does not fit mxfp8" in reason
    (reason,) = flag_reasons(served, ("triton", "triton"), "auto")
    assert "--inkling-layer-recipes 0-1:mxfp8,31:bf16 needs --attention-backend" in reason
    monkeypatch.setenv("INKLING_KERNELS", "fa4")
    assert any("reads MXFP8 alone" in reason for reason in reasons(nvfp4, served, config=llama))


def test_sink_tokens() -> None:
    flags = Flags(inkling_sink_tokens=4)
    for dtype in ("mxfp8", "nvfp4", "fp4_mx_block16", "mxfp8-nvfp4"):
        assert reasons(arguments(kv_cache_dtype=dtype), flags) == []
    (reason,) = reasons(arguments(kv_cache_dtype="bf16"), flags)
    assert "--inkling-sink-tokens with --kv-cache-dtype bf16" in reason
    grams = arguments(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4)
    assert reasons(grams, Flags()) == []
    (reason,) = reasons(grams, flags)
    assert "--inkling-sink-tokens with drafts of n-grams" in reason
    chain = arguments(speculative_algorithm="EAGLE", speculative_num_draft_tokens=4)
    assert reasons(chain, flags) == []
    (reason,) = flag_reasons(flags, ("triton", "triton"), "auto")
    assert "--inkling-sink-tokens 4 needs --attention-backend inkling" in reason


def test_four_over_six_of_single_layers() -> None:
    flags = Flags(inkling_layer_recipes="0:nvfp4", inkling_nvfp4_scale="fouroversix")
    assert reasons(arguments(), flags, config=model(num_hidden_layers=32)) == []


def test_centers_need_logits_that_may_shift() -> None:
    layout = CacheLayout(get_format("mxfp8"), get_format("mxfp8"), 2, 128, 128)
    layers = [layer(), layer(logit_cap=50.0)]
    assert layer_reasons(layers, layout, 8, whole_prompts=False) == []
    (reason,) = layer_reasons(layers, layout, 8, whole_prompts=False, centers=True)
    assert "soft-cap" in reason
    assert "(1 layers): set --inkling-key-transform to rotate" in reason


def test_pages_of_the_host_tier_outlive_no_center() -> None:
    served = arguments(enable_hierarchical_cache=True)
    assert reasons(served, Flags(inkling_key_transform="rotate")) == []
    (reason,) = reasons(served, Flags(inkling_key_transform="center+rotate"))
    assert "a center of the keys with HiCache" in reason


def test_centers_need_one_pool_and_no_sinks() -> None:
    assert center_reasons(sinks=False, two_pools=False) == []
    one, two = center_reasons(sinks=True, two_pools=True)
    assert "attention sinks" in one
    assert "--disable-hybrid-swa-memory" in two


@pytest.mark.parametrize("name", ["sinks", "attention_sink_bias"])
def test_models_with_sinks_are_known(name: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    assert not versions.has_sinks(model)
    setattr(model[1], name, torch.nn.Parameter(torch.zeros(1)))
    assert versions.has_sinks(model)


def test_own_options_need_the_backend() -> None:
    theirs = ("triton", "triton")
    assert flag_reasons(Flags(), theirs, "auto") == []
    assert flag_reasons(Flags("nvfp4"), BOTH, "nvfp4") == []
    assert flag_reasons(Flags(), BOTH, "mxfp8-nvfp4") == []
    assert flag_reasons(Flags(), theirs, "mxfp8-nvfp4")[0].startswith("--kv-cache-dtype mxfp8-nv")
    (reason,) = flag_reasons(Flags("nvfp4", "bf16"), theirs, "nvfp4")
    assert "--fp4-kv-cache-recipe nvfp4" in reason
    assert "--inkling-query-dtype bf16" in reason
    assert "triton" in reason


def layer(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "attn_type": SimpleNamespace(value="decoder"),
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "scaling": 0.125,
        "is_cross_attention": False,
        "use_irope": False,
        "xai_temperature_len": -1,
        "tp_q_head_num": 8,
        "tp_k_head_num": 2,
        "qk_head_dim": 128,
        "v_head_dim": 128,
    }
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "encoder_only"),
        ({"attn_type": "decoder_bidirectional"}, "--chunked-prefill-size -1"),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "sigmoid"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"use_irope": True}, "iRoPE"),
        ({"xai_temperature_len": 1024}, "temperature"),
        ({"qk_head_dim": 192}, "192"),
        ({"tp_q_head_num": 16}, "16"),
    ],
)
def test_unsupported_layers(changes: dict[str, Any], word: str) -> None:
    recipe = get_recipe("mxfp8")
    layout = CacheLayout(recipe.k, recipe.v, 2, 128, 128)
    assert layer_reasons([layer()] * 3, layout, 8, whole_prompts=False) == []
    layers = [layer(), layer(**changes), layer(**changes)]
    (reason,) = layer_reasons(layers, layout, 8, whole_prompts=False)
    assert word in reason
    assert "(2 layers)" in reason


def test_layers_that_see_further_than_their_pool_keeps() -> None:
    recipe = get_recipe("mxfp8")
    layout = CacheLayout(recipe.k, recipe.v, 2, 128, 128)
    layers = [
        layer(layer_id=i, sliding_window_size=size) for i, size in enumerate((-1, 127, 128, -1))
    ]

    def found(kept: int | None, *window_slots: int) -> list[str]:
        sets = {"window_slots": frozenset(window_slots), "kept_window": kept}
        return layer_reasons(layers, layout, 8, whole_prompts=False, **sets)  # type: ignore[arg-type]

    assert found(127) == found(127, 1) == found(128, 1, 2) == []
    for reasons in (found(127, 2), found(128, 3), found(None, 1)):
        (reason,) = reasons
        assert "--disable-hybrid-swa-memory" in reason
    assert "128 tokens before its own" in found(127, 1, 2)[0]
    assert "all tokens" in found(127, 1, 0)[0]


def test_layers_that_whole_prompts_allow() -> None:
    recipe = get_recipe("mxfp8")
    layout = CacheLayout(recipe.k, recipe.v, 2, 128, 128)
    layers = [layer(attn_type="encoder_only"), layer(sliding_window_size=7), layer(logit_cap=30.0)]
    assert layer_reasons(layers, layout, 8, whole_prompts=True) == []


@pytest.mark.parametrize(
    ("chunk", "no_cache", "whole"),
    [(-1, True, True), (None, True, True), (-1, False, False), (8192, True, False)],
)
def test_whole_prompts(chunk: int | None, no_cache: bool, whole: bool) -> None:
    args = SimpleNamespace(chunked_prefill_size=chunk, disable_radix_cache=no_cache)
    assert takes_whole_prompts(args) is whole


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({}, LayerAttention(0.125)),
        ({"sliding_window_size": None, "logit_cap": None}, LayerAttention(0.125)),
        ({"scaling": 1.0, "sliding_window_size": 0}, LayerAttention(1.0, window=0)),
        ({"sliding_window_size": 1023, "logit_cap": 50}, LayerAttention(0.125, 1023, 50.0)),
        (
            {"attn_type": "encoder_only", "sliding_window_size": 7},
            LayerAttention(0.125, causal=False),
        ),
    ],
)
def test_what_a_layer_asks_for(changes: dict[str, Any], attention: LayerAttention) -> None:
    assert layer_attention(layer(**changes)) == attention
