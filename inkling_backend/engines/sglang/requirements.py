"""What the backend refuses: every reason at once, each with what to do instead.

`argument_reasons` judges what is known before weights load: the arguments, the model's
configuration and the device. `layer_reasons` judges the attention layers of the loaded model. Both
read plain attributes, so that they can be tested without an engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from inkling_backend import env
from inkling_backend.attention import AttentionSpec, fa4, reasons_against
from inkling_backend.engines.sglang import speculation, versions
from inkling_backend.engines.sglang.flags import (
    BACKEND,
    DEFAULT_KV_CACHE_DTYPE,
    FP4_RECIPES,
    KV_CACHE_DTYPES,
    OWN_KV_CACHE_DTYPES,
    Flags,
)
from inkling_backend.engines.sglang.layer import attention_kind, window_of
from inkling_backend.engines.sglang.layer_recipes import layer_recipe_reasons
from inkling_backend.engines.sglang.sink_tokens import sink_token_reasons
from inkling_backend.engines.sglang.speculation import NO_DRAFT
from inkling_backend.errors import EnvironmentVariableError
from inkling_backend.formats import get_recipe
from inkling_backend.formats.layout import CacheLayout

_OTHER = "use another attention backend"
_NO_CENTER = "set --inkling-key-transform to rotate or none"
_ONE_POOL = "set --disable-hybrid-swa-memory"
_WHOLE = "set --chunked-prefill-size -1 and --disable-radix-cache"

# Field of the arguments, whether its value asks for the feature, what the feature is.
_UNSUPPORTED: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (
        "speculative_algorithm",
        lambda value: bool(value) and str(value).upper() not in speculation.KNOWN,
        "speculation by other ways than EAGLE, EAGLE3, NEXTN, STANDALONE and NGRAM "
        "(--speculative-algorithm)",
    ),
    (
        "speculative_eagle_topk",
        lambda value: (value or 1) > 1,
        "drafting trees, with more than one candidate (--speculative-eagle-topk)",
    ),
    ("enable_multi_layer_eagle", bool, "a draft of several models (--enable-multi-layer-eagle)"),
    ("speculative_adaptive", bool, "changing the length of drafts (--speculative-adaptive)"),
    (
        "speculative_draft_attention_backend",
        lambda value: value not in (None, BACKEND),
        "another backend for the draft model (--speculative-draft-attention-backend)",
    ),
    (
        "speculative_draft_kv_cache_dtype",
        bool,
        "a recipe of its own for the draft model (--speculative-draft-kv-cache-dtype)",
    ),
    (
        "speculative_draft_window_size",
        bool,
        "a window for the draft model (--speculative-draft-window-size)",
    ),
    (
        "hicache_storage_backend",
        bool,
        "a storage backend behind HiCache (--hicache-storage-backend)",
    ),
    ("enable_lmcache", bool, "LMCache (--enable-lmcache)"),
    ("enable_flexkv", bool, "FlexKV (--enable-flexkv)"),
    (
        "enable_unified_cache_external_linker",
        bool,
        "an external cache (--enable-unified-cache-external-linker)",
    ),
    (
        "disaggregation_mode",
        lambda value: value not in (None, "null"),
        "prefill/decode disaggregation (--disaggregation-mode)",
    ),
    (
        "disaggregation_decode_enable_offload_kvcache",
        bool,
        "KV cache offload (--disaggregation-decode-enable-offload-kvcache)",
    ),
    ("dcp_size", lambda value: (value or 1) > 1, "decode context parallelism (--dcp-size)"),
    ("attn_cp_size", lambda value: (value or 1) > 1, "context parallelism (--attn-cp-size)"),
    ("enable_prefill_cp", bool, "prefill context parallelism (--enable-prefill-cp)"),
    ("enable_kv_cache_sharding", bool, "KV cache sharding (--enable-kv-cache-sharding)"),
    ("enable_unified_memory", bool, "the unified memory pool (--enable-unified-memory)"),
    (
        "enable_page_major_kv_layout",
        bool,
        "the page-major layout (--enable-page-major-kv-layout)",
    ),
    ("enable_hisparse", bool, "HiSparse (--enable-hisparse)"),
    (
        "prefill_only_disable_kv_cache",
        bool,
        "serving without a KV cache (--prefill-only-disable-kv-cache)",
    ),
    ("enable_two_batch_overlap", bool, "two-batch overlap (--enable-two-batch-overlap)"),
    ("enable_torch_compile", bool, "torch.compile of the model (--enable-torch-compile)"),
    ("enable_pdmux", bool, "PD multiplexing (--enable-pdmux)"),
    ("dllm_algorithm", bool, "diffusion language models (--dllm-algorithm)"),
    (
        "kv_canary",
        lambda value: value not in (None, False, "none"),
        "the KV canary (--kv-canary)",
    ),
)


def uses_backend(backends: Iterable[str | None]) -> bool:
    """Whether this backend is the prefill or the decode backend."""
    return BACKEND in tuple(backends)


def flag_reasons(
    flags: Flags, backends: tuple[str | None, str | None], kv_cache_dtype: str | None
) -> list[str]:
    """Why the backend's own options and values cannot be used with these attention backends."""
    own_dtype = kv_cache_dtype if kv_cache_dtype in OWN_KV_CACHE_DTYPES else None
    if uses_backend(backends) or not (flags.any_set or own_dtype):
        return []
    given = [
        f"{name} {value}"
        for name, value, default in (
            ("--fp4-kv-cache-recipe", flags.fp4_kv_cache_recipe, None),
            ("--inkling-query-dtype", flags.inkling_query_dtype, "auto"),
            ("--inkling-key-transform", flags.inkling_key_transform, "none"),
            ("--inkling-nvfp4-scale", flags.inkling_nvfp4_scale, "max"),
            ("--inkling-layer-recipes", flags.inkling_layer_recipes, None),
            ("--inkling-sink-tokens", flags.inkling_sink_tokens, 0),
            ("--kv-cache-dtype", None if flags.fp4_kv_cache_recipe else own_dtype, None),
        )
        if value != default
    ]
    return [
        f"{' and '.join(given)} needs --attention-backend {BACKEND}, "
        f"but the attention backend is {backends[0] or 'not set'}"
    ]


def argument_reasons(
    arguments: Any,
    flags: Flags,
    backends: tuple[str | None, str | None],
    model: Any,
    *,
    capability: tuple[int, int] | None,
    cpu_supported: bool = True,
    host_tier_supported: bool = True,
    tp_size: int = 1,
    traits: Iterable[str] = (),
) -> list[str]:
    """Every reason known before weights load why this server cannot run (empty if it can).

    Args:
        arguments: the engine's arguments as resolved so far, with ``kv_cache_dtype`` and
            ``page_size`` already defaulted.
        flags: the backend's own options.
        backends: names of the prefill and of the decode attention backend.
        model: the engine's model configuration.
        capability: compute capability of the GPU, None without one.
        cpu_supported: whether this engine version can run on CPU with pages.
        host_tier_supported: whether this engine version lets a pool bring its own host tier.
        tp_size: ranks that share the attention heads.
        traits: other kinds of model that the engine recognised and the backend cannot serve.
    """
    return [
        *_cache_reasons(arguments, flags, backends),
        *_device_reasons(arguments, capability, cpu_supported),
        *_model_reasons(model),
        *_inkling_reasons(backends, model),
        *(f"the model has {trait}, which are not supported: {_OTHER}" for trait in traits),
        *_attention_reasons(arguments, flags, model, capability, tp_size),
        *layer_recipe_reasons(arguments, flags, model),
        *sink_token_reasons(arguments, flags),
        *_feature_reasons(arguments),
        *_host_tier_reasons(arguments, model, host_tier_supported),
        *speculation.speculation_reasons(arguments, backends, model),
    ]


def _cache_reasons(
    arguments: Any, flags: Flags, backends: tuple[str | None, str | None]
) -> list[str]:
    reasons = []
    dtype, recipe = arguments.kv_cache_dtype, flags.fp4_kv_cache_recipe
    if recipe is not None and dtype != FP4_RECIPES[recipe]:
        reasons.append(
            f"--fp4-kv-cache-recipe {recipe} conflicts with --kv-cache-dtype {dtype}: drop one, "
            f"or set --kv-cache-dtype {FP4_RECIPES[recipe]}"
        )
    if dtype not in KV_CACHE_DTYPES:
        reasons.append(
            f"--kv-cache-dtype {dtype} is not one of this backend's: "
            f"auto, {', '.join(KV_CACHE_DTYPES)}"
        )
    elif flags.quantizes_query and not get_recipe(KV_CACHE_DTYPES[dtype]).takes_mxfp8_query:
        reasons.append(
            f"--inkling-query-dtype mxfp8 needs K in MXFP8, but --kv-cache-dtype is {dtype}: "
            "leave it out, or take mxfp8 or mxfp8-nvfp4"
        )
    kept = [get_recipe(KV_CACHE_DTYPES.get(dtype, DEFAULT_KV_CACHE_DTYPE))]
    kept += flags.layer_recipes().values()
    if flags.four_over_six and not any(each.has_nvfp4 for each in kept):
        reasons.append(
            f"--inkling-nvfp4-scale fouroversix is a rule of NVFP4 blocks, but --kv-cache-dtype is "
            f"{dtype}: leave it out, or take nvfp4 or mxfp8-nvfp4"
        )
    if flags.inkling_key_transform != "none" and KV_CACHE_DTYPES.get(dtype) == "bf16":
        reasons.append(
            f"--inkling-key-transform {flags.inkling_key_transform} makes the error of a quantized "
            "cache smaller, and --kv-cache-dtype bf16 has none: leave one of them out"
        )
    if flags.centers_keys and getattr(arguments, "enable_hierarchical_cache", False):
        reasons.append(
            "a center of the keys with HiCache, which keeps pages from before it was fixed, is not "
            f"supported: {_NO_CENTER}"
        )
    prefill, decode = backends
    if prefill != decode and KV_CACHE_DTYPES.get(dtype) != "bf16":
        other, phase = (decode, "decode") if prefill == BACKEND else (prefill, "prefill")
        reasons.append(
            f"the {phase} attention backend ({other or 'the default one'}) cannot read a cache in "
            f"{dtype}: use "
            f"--attention-backend {BACKEND} for both phases, or --kv-cache-dtype bf16"
        )
    if os.environ.get("SGLANG_USE_HND_KVCACHE", "").lower() in ("1", "true", "yes", "y"):
        reasons.append("SGLANG_USE_HND_KVCACHE is set, but the cache is token-major: unset it")
    if os.environ.get("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "").lower() in ("1", "true", "y"):
        reasons.append(
            "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING resizes the cache after CUDA graph capture, "
            "which block-scaled pages do not support: unset it"
        )
    return reasons


def _device_reasons(
    arguments: Any, capability: tuple[int, int] | None, cpu_supported: bool
) -> list[str]:
    device = arguments.device
    if device == "cpu":
        if not cpu_supported:
            return ["this SGLang version cannot page a CPU cache: use SGLang 0.5.23 or newer"]
        if getattr(arguments, "enable_deterministic_inference", False):
            return ["--enable-deterministic-inference needs a GPU: unset it"]
        return []
    if device != "cuda" or torch.version.hip is not None:
        return [f"device {'rocm' if torch.version.hip else device} is not supported: cuda, cpu"]
    if capability is None:
        return ["a GPU of compute capability 8.0 (SM80) or newer is needed, but none was found"]
    return []


def environment_reasons(device: str) -> list[str]:
    """Why the kernels that INKLING_KERNELS asks for cannot run on the device (empty if they can).

    The answer of this process's environment, so that nothing is found missing after weights loaded.
    """
    try:
        if env.implementation(device) == "reference":
            return []
        if env.asks_for_fa4():
            versions.fa4()
    except EnvironmentVariableError as error:
        return [str(error)]
    except ImportError as error:
        return [f"INKLING_KERNELS=fa4 cannot be had from this SGLang ({error}): unset it"]
    try:
        from triton import knobs
    except Exception as error:  # whatever a broken installation raises
        return [
            f"Triton cannot be imported ({type(error).__name__}: {error}): install the version "
            f"that torch {torch.__version__} wants"
        ]
    if device == "cuda" and knobs.runtime.interpret:
        return ["TRITON_INTERPRET is set, which would run the kernels on the CPU: unset it"]
    if device != "cuda" and not knobs.runtime.interpret:
        return [f"INKLING_KERNELS=triton on {device} needs TRITON_INTERPRET=1: unset it"]
    return []


def _architecture(model: Any) -> str:
    return getattr(getattr(model, "attention_arch", None), "name", "MHA")


def _model_reasons(model: Any) -> list[str]:
    reasons = []
    if _architecture(model) != "MHA":
        reasons.append(f"{_architecture(model)} attention is not supported: {_OTHER}")
    if getattr(model, "is_encoder_decoder", False):
        reasons.append(f"encoder-decoder models (cross attention) are not supported: {_OTHER}")
    if getattr(model, "attention_chunk_size", None):
        reasons.append(f"chunked local attention is not supported: {_OTHER}")
    dims = (model.head_dim, model.v_head_dim)
    window_dims = tuple(
        getattr(model, name, None) or dim
        for name, dim in zip(("swa_head_dim", "swa_v_head_dim"), dims, strict=True)
    )
    if window_dims != dims and _architecture(model) == "MHA":
        reasons.append(
            f"sliding-window layers with heads of their own size ({window_dims[0]} and "
            f"{window_dims[1]} instead of {dims[0]} and {dims[1]}) are not supported: {_OTHER}"
        )
    heads = model.get_num_kv_heads(1)
    window_heads = getattr(model, "get_swa_num_kv_heads", model.get_num_kv_heads)(1)
    if window_heads != heads and _architecture(model) == "MHA":
        reasons.append(
            f"sliding-window layers with KV heads of their own ({window_heads} instead of {heads}) "
            f"are not supported: {_OTHER}"
        )
    return reasons


def _inkling_reasons(backends: tuple[str | None, str | None], model: Any) -> list[str]:
    """Why Inkling cannot be served so; other models have no such reasons."""
    if not versions.is_inkling(model) or backends[0] == backends[1]:
        return []
    return [
        f"Inkling's layers call one attention backend: use --attention-backend {BACKEND} for both "
        "phases"
    ]


def _attention_reasons(
    arguments: Any,
    flags: Flags,
    model: Any,
    capability: tuple[int, int] | None,
    tp_size: int,
) -> list[str]:
    if _architecture(model) != "MHA":
        return []
    recipe = get_recipe(KV_CACHE_DTYPES.get(arguments.kv_cache_dtype, DEFAULT_KV_CACHE_DTYPE))
    q_heads, kv_heads = model.num_attention_heads // tp_size, model.get_num_kv_heads(tp_size)
    dims, page_size = (model.head_dim, model.v_head_dim), arguments.page_size
    quantize_query = flags.quantizes_query and recipe.takes_mxfp8_query
    reasons: list[str] = []
    for each in (recipe, *flags.layer_recipes().values()):
        found = reasons_against(
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            k_format=each.k,
            v_format=each.v,
            k_head_dim=dims[0],
            v_head_dim=dims[1],
            page_size=page_size,
            dtype=model.dtype,
            quantize_query=quantize_query,
            capability=capability,
            q_len=speculation.verified_tokens(arguments),
        )
        reasons += [reason for reason in found if reason not in reasons]
    if not reasons and env.asks_for_fa4():
        sinks = flags.inkling_sink_tokens if recipe.is_quantized else 0
        layout = CacheLayout(recipe.k, recipe.v, kv_heads, *dims, page_size, sinks)
        biased = versions.is_inkling(model)
        spec = AttentionSpec(q_heads, layout, model.dtype, quantize_query, biased)
        reasons = fa4.reasons_against(spec, capability)
    return reasons


def _feature_reasons(arguments: Any) -> list[str]:
    reasons = [
        f"{what} is not supported: turn it off, or {_OTHER}"
        for field, unsupported, what in _UNSUPPORTED
        if unsupported(getattr(arguments, field, None))
    ]
    graphs = getattr(arguments, "cuda_graph_config", None)
    if getattr(getattr(graphs, "prefill", None), "backend", None) == "full":
        reasons.append(
            "--cuda-graph-backend-prefill full is not supported: use breakable or disabled"
        )
    return reasons


def sink_reason() -> str:
    """Why the keys of a model with attention sinks are not centered."""
    return f"a center of the keys beside attention sinks, which see the shift: {_NO_CENTER}"


def center_reasons(*, sinks: bool, two_pools: bool) -> list[str]:
    """Why the keys of this model cannot be centered (empty if they can).

    Args:
        sinks: whether it has attention sinks.
        two_pools: whether layers with a window have a pool of their own.
    """
    reasons = [sink_reason()] if sinks else []
    if two_pools:
        reasons.append(f"a center of the keys in two pools is not supported: {_ONE_POOL}")
    return reasons


def _host_tier_reasons(arguments: Any, model: Any, supported: bool) -> list[str]:
    if not getattr(arguments, "enable_hierarchical_cache", False):
        return []
    reasons = []
    if not supported:
        reasons.append("HiCache (--enable-hierarchical-cache) needs SGLang 0.5.23 or newer")
    if versions.windows_have_a_pool(arguments, model):
        reasons.append(f"HiCache over a pool for layers with a window: {_ONE_POOL}")
    return reasons


def takes_whole_prompts(arguments: Any) -> bool:
    """Whether every prompt is computed at once, as bidirectional attention needs it."""
    return (arguments.chunked_prefill_size or -1) < 0 and bool(arguments.disable_radix_cache)


def layer_reasons(
    layers: Iterable[Any],
    layout: CacheLayout,
    num_q_heads: int,
    *,
    whole_prompts: bool,
    verifies: bool = False,
    trees: bool = False,
    centers: bool = False,
    window_slots: Collection[int] = (),
    kept_window: int | None = None,
) -> list[str]:
    """Why these attention layers of the loaded model cannot be served (empty if they can).

    Args:
        layers: the model's ``RadixAttention`` modules.
        layout: geometry of the cache.
        num_q_heads: query heads that the attention runner was built for.
        whole_prompts: of `takes_whole_prompts`.
        verifies: whether several tokens of a request are verified at once.
        trees: whether they are trees.
        centers: whether keys are centered, which shifts the logits of a row alike.
        window_slots: numbers of the layers whose pages lie in a pool for windows.
        kept_window: tokens before the newest one whose pages that pool keeps.
    """
    found: dict[tuple[str, str], int] = {}

    def note(reason: str, remedy: str = _OTHER) -> None:
        found[reason, remedy] = found.get((reason, remedy), 0) + 1

    for layer in layers:
        if layer.logit_cap and layer.logit_capping_method != "tanh":
            note(f"the logit soft-cap {layer.logit_capping_method}")
        if layer.logit_cap and centers:
            note("a center of the keys under a logit soft-cap, which sees the shift", _NO_CENTER)
        if layer.is_cross_attention:
            note("cross attention")
        if attention_kind(layer) != "decoder" and not whole_prompts:
            note(f"{attention_kind(layer)} (bidirectional) attention to part of a prompt", _WHOLE)
        if attention_kind(layer) != "decoder" and verifies:
            note(f"{attention_kind(layer)} (bidirectional) attention to drafts", NO_DRAFT)
        if window_of(layer) is not None and trees:
            note("a sliding window over trees, whose tokens lie elsewhere than stored", NO_DRAFT)
        if layer.use_irope:
            note("chunked local attention (iRoPE)")
        if layer.xai_temperature_len > 0:
            note("attention temperature by position")
        if window_slots and layer.layer_id in window_slots:
            window = window_of(layer)
            if window is None or kept_window is None or window > kept_window:
                seen = "all tokens" if window is None else f"{window} tokens before its own"
                note(f"a pool of {kept_window} tokens for layers that see {seen}", _ONE_POOL)
        have = (layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim, layer.v_head_dim)
        want = (num_q_heads, layout.num_kv_heads, layout.k_head_dim, layout.v_head_dim)
        if have != want:
            note(
                f"layers that differ from the model's configuration: query heads, KV heads, "
                f"head_dim of K and V are {have} instead of {want}"
            )
    return [
        f"{reason} is not supported ({n} layers): {remedy}" for (reason, remedy), n in found.items()
    ]
