"""A tiny Inkling: its configuration, random weights that say something, and kernels for a CPU.

A plugin, put on the module path of one test's engine. The engine fills "dummy" weights with
thousandths, under which attention changes nothing; here they get the sizes of trained ones. And
where there is no GPU, the few Triton kernels of its short convolutions get bodies in plain torch
with their contract. Attention, and what is said, is up to the engine and to us.
"""

from __future__ import annotations

import importlib
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from integration.probe import write_plugin

VOCAB = 512
WINDOW, EXTENT = 64, 96
# Layers in turn with a window and without; no experts.
TEXT: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 256,
    "dense_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "d_rel": 16,
    "rel_extent": EXTENT,
    "local_layer_ids": [0, 2],
    "sliding_window_size": WINDOW,
    "use_sconv": True,
    "use_embed_norm": True,
    "dense_mlp_idx": 4,
    "n_routed_experts": 0,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 8192,
    "mtp_local_layer_ids": [],
    # Queries and biases grow with the position, from this one on.
    "log_scaling_n_floor": 128,
    "log_scaling_alpha": 0.5,
}
# Keywords of ``sglang.Engine``: no weights, no tokenizer.
DUMMY: dict[str, object] = {"load_format": "dummy", "skip_tokenizer_init": True}
_SCONV = "sglang.srt.models.inkling_common.kernels.sconv"


def config(**changes: object) -> dict[str, object]:
    """What `tiny_models.write_config` writes; ``changes`` are fields of the text model."""
    text = TEXT | changes
    width = {"decoder_dmodel": text["hidden_size"]}
    return {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": "inkling_mm_model",
        "torch_dtype": "bfloat16",
        "text_config": text,
        "audio_config": width,
        "vision_config": width,
    }


def plugin(folder: Path) -> dict[str, str]:
    """Environment variables of an engine that can serve it; ``folder`` is for the plugin."""
    write_plugin(folder, "integration-inkling-tiny", "integration.inkling_tiny:register")
    return {"PYTHONPATH": str(folder)}


def register() -> None:
    """Entry point: random weights, and without a GPU what the engine has for one alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
    HookRegistry.register(target, fill, HookType.REPLACE)
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    target = "sglang.srt.arg_groups.mamba_hook._platform_supports_mamba_cache_extra_buffer"
    HookRegistry.register(target, lambda: True, HookType.REPLACE)
    target = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
    HookRegistry.register(target, _bring_kernels, HookType.BEFORE)


def fill(model: Any, *args: object, **kwargs: object) -> None:
    """Random weights by name, the same on every device."""
    for name, weight in model.named_parameters():
        weight.data.copy_(values(name, *weight.shape))


def values(name: str, *shape: int) -> Any:
    """The weight that the engine keeps under this name, bfloat16."""
    import torch

    x = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith("rel_logits_proj.proj"):
        x *= 0.6
    elif "_sconv." in name:
        x *= 0.4
    elif len(shape) == 1:
        # Logits are products of normalized rows, over the head size.
        size = 4.0 if name.endswith(("q_norm.weight", "k_norm.weight")) else 1.0
        x = size * (1.0 + 0.1 * x)
    elif "embed" not in name:
        x *= shape[-1] ** -0.5
    return x.bfloat16()


def _bring_kernels(*args: object, **kwargs: object) -> None:
    import torch

    # The engine pins masks of states for a copy to a GPU, asking nobody whether there is one.
    torch.Tensor.pin_memory = lambda tensor, *args: tensor  # type: ignore[method-assign]
    bodies: Mapping[str, Mapping[str, Callable[..., Any]]] = {
        _SCONV: {
            "causal_conv1d": causal_conv,
            "update_sconv_cache": update_states,
            "fused_causal_conv1d_update_decode": decode_conv,
            "fused_decode_sconv_metadata": decode_metadata,
        },
        "sglang.srt.models.inkling_common.sconv": {
            "causal_conv1d": causal_conv,
            "update_sconv_cache": update_states,
            "fused_causal_conv1d_update_decode": decode_conv,
            "fused_gather_scatter_to_sconv_cache": keep_states,
        },
        "sglang.srt.models.inkling_common.attn": {"_apply_log_scaling_tau": scale_rows},
        "sglang.srt.layers.attention.linear.inkling_sconv_backend": {
            "fused_decode_sconv_metadata": decode_metadata,
            "fused_replay_state_indices": state_indices,
        },
    }
    for name, functions in bodies.items():
        module = importlib.import_module(name)
        for function, body in functions.items():
            assert hasattr(module, function), f"{module.__name__} has no {function}"
            setattr(module, function, body)


def _activated(out: Any, x: Any, activation: str | None, use_residual: bool) -> Any:
    if activation is not None:
        out = out * out.sigmoid()
    return (out + x.float() if use_residual else out).to(x.dtype)


def causal_conv(
    x,
    weight,
    sconv_cache,
    cache_mask,
    safe_idx,
    cu,
    si,
    activation=None,
    use_residual=True,
    is_decode=False,
):
    """Depthwise causal convolution of each request's rows, after the rows that its state holds."""
    import torch

    width = weight.shape[1]
    out = torch.zeros(x.shape, dtype=torch.float32)
    for b, (first, last) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        before = sconv_cache[safe_idx[b]] * cache_mask[b].to(x.dtype)
        rows = torch.cat([before, x[first:last]]).float()
        for tap in range(width):
            out[first:last] += rows[tap : tap + last - first] * weight[:, tap].float()
    return _activated(out, x, activation, use_residual)


def update_states(x, sconv_cache, cache_indices, has_initial_state, query_start_loc):
    """Each request's state becomes its last rows."""
    import torch

    kept, starts = sconv_cache.shape[1], query_start_loc.tolist()
    for b, slot in enumerate(cache_indices.tolist()):
        if slot < 0 or starts[b] == starts[b + 1]:
            continue
        before = sconv_cache[slot] * bool(has_initial_state[b])
        sconv_cache[slot] = torch.cat([before, x[starts[b] : starts[b + 1]]])[-kept:]


def decode_conv(
    x,
    weight,
    sconv_cache,
    cache_indices,
    cache_mask,
    activation=None,
    use_residual=True,
    track_mask=None,
    track_indices=None,
):
    """The convolution of one row for each request; its state, and a copy where it is tracked."""
    import torch

    out = torch.zeros(x.shape, dtype=torch.float32)
    valid = cache_mask.view(-1)
    for b, slot in enumerate(cache_indices.tolist()):
        before = sconv_cache[max(slot, 0)] * bool(valid[b])
        rows = torch.cat([before, x[b : b + 1]])
        out[b] = (rows.float() * weight.T.float()).sum(0)
        if slot < 0:
            continue
        sconv_cache[slot] = rows[1:]
        if track_mask is not None and bool(track_mask.view(-1)[b]):
            sconv_cache[int(track_indices[b])] = rows[1:]
    return _activated(out, x, activation, use_residual)


def keep_states(hidden_states, sconv_cache, track_conv_indices, mask, dst_indices):
    """Rows that the prefix cache keeps as a state."""
    for b, wanted in enumerate(mask.tolist()):
        if wanted:
            rows = hidden_states[track_conv_indices[b].long()]
            sconv_cache[int(dst_indices[b])] = rows


def decode_metadata(B, cache_indices, out=None):
    """Every request has one row and a state."""
    import torch

    rows, valid = torch.arange(B + 1), cache_indices != -1
    values = {
        "query_start_loc": rows.int(),
        "has_initial_state": torch.ones(B, dtype=torch.bool),
        "cache_mask": valid[:, None, None],
        "safe_idx": cache_indices.clamp(min=0).long(),
        "cu": rows,
        "si": rows[:-1].int(),
    }
    if out is not None:
        values = {name: out[name].copy_(value) for name, value in values.items()}
    loc, state = values.pop("query_start_loc"), values.pop("has_initial_state")
    return loc, state, values


def state_indices(
    *, req_pool_indices, mamba_index_mapping, out_state_indices, valid_bs, total_bs, v2p=None
):
    """The state of each request, -1 for padding, whose request becomes the padding one."""
    assert v2p is None, "states lie where the requests say"
    req_pool_indices[valid_bs:total_bs] = 0
    out_state_indices[valid_bs:total_bs] = -1
    out_state_indices[:valid_bs] = mamba_index_mapping[req_pool_indices[:valid_bs].long()]
    return out_state_indices[:total_bs]


def scale_rows(x, tau):
    """Each row times its factor, rounded once."""
    return (x.float() * tau.float()).to(x.dtype)
