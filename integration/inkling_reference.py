"""The tiny Inkling in transformers' implementation, in float32: what the engine should say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from integration.inkling_tiny import TEXT, values


def reference(**changes: object) -> Any:
    """The model of `inkling_tiny.config`, with the same weights; eager, in float32."""
    import torch
    from transformers.models.inkling.configuration_inkling import InklingTextConfig
    from transformers.models.inkling.modeling_inkling import InklingForCausalLM

    text: dict[str, Any] = {**TEXT, **changes}
    unknown = ("use_sconv", "use_embed_norm", "num_nextn_predict_layers", "mtp_local_layer_ids")
    for name in (*unknown, "intermediate_size", "n_routed_experts"):
        text.pop(name)
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        text.setdefault(f"swa_{name}", text[name])
    config = InklingTextConfig(**text, logits_mup_width_multiplier=1.0)
    network = InklingForCausalLM._from_config(config, attn_implementation="eager")
    wanted = dict(network.named_parameters())
    with torch.no_grad():
        for name, value in _weights(config):
            wanted.pop(name).copy_(value)
        for name in [name for name in wanted if name.endswith("global_scale")]:
            wanted.pop(name).fill_(1.0)
    assert not wanted, f"no values for {list(wanted)}"
    return network.float().eval()


def _weights(config: Any) -> Iterator[tuple[str, Any]]:
    """transformers' names, and values cut from the engine's fused weights."""
    hidden, vocab, width = config.hidden_size, config.vocab_size, config.intermediate_size
    yield "model.embed_tokens.weight", values("llm.embed_tokens.weight", vocab, hidden)
    yield "model.embed_tokens.embed_norm.weight", values("llm.embed_norm.weight", hidden)
    yield "model.norm.weight", values("llm.norm.weight", hidden)
    yield "lm_head.weight", values("llm.lm_head.weight", vocab, hidden)
    for i, kind in enumerate(config.layer_types):
        local = kind == "hybrid_sliding"
        heads, kv_heads, dim = (
            getattr(config, f"{'swa_' if local else ''}{name}")
            for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        ours, theirs = f"llm.layers.{i}", f"model.layers.{i}"
        sizes = [heads * dim, kv_heads * dim, kv_heads * dim, heads * config.d_rel]
        fused = values(f"{ours}.attn.qkvr.weight", sum(sizes), hidden).split(sizes)
        for name, part in zip("qkvr", fused, strict=True):
            yield f"{theirs}.self_attn.{name}_proj.weight", part
        out = values(f"{ours}.attn.wo_ud.weight", hidden, heads * dim)
        yield f"{theirs}.self_attn.o_proj.weight", out
        extent = config.sliding_window_size if local else config.rel_extent
        proj = values(f"{ours}.attn.rel_logits_proj.proj", config.d_rel, extent)
        yield f"{theirs}.self_attn.rel_logits_proj.proj", proj
        for name in ("q_norm", "k_norm"):
            norm = values(f"{ours}.attn.{name}.weight", dim)
            yield f"{theirs}.self_attn.{name}.weight", norm
        taps = config.conv_kernel_size
        for name in ("k_sconv", "v_sconv"):
            conv = values(f"{ours}.attn.{name}.weight", kv_heads * dim, 1, taps)
            yield f"{theirs}.self_attn.{name}.conv1d.weight", conv
        for name in ("attn_sconv", "mlp_sconv"):
            yield f"{theirs}.{name}.conv1d.weight", values(f"{ours}.{name}.weight", hidden, 1, taps)
        # Rows of gate and up in turn.
        fused = values(f"{ours}.mlp.gate_up_proj.weight", 2 * width, hidden)
        yield f"{theirs}.mlp.gate_proj.weight", fused[0::2]
        yield f"{theirs}.mlp.up_proj.weight", fused[1::2]
        down = values(f"{ours}.mlp.down_proj.weight", hidden, width)
        yield f"{theirs}.mlp.down_proj.weight", down
        yield f"{theirs}.input_layernorm.weight", values(f"{ours}.attn_norm.weight", hidden)
        yield f"{theirs}.post_attention_layernorm.weight", values(f"{ours}.mlp_norm.weight", hidden)
