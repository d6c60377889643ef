"""What the engine's ``RadixAttention`` layers ask for, read from their plain attributes."""

from __future__ import annotations

from typing import Any

from inkling_backend.attention import LayerAttention


def attention_kind(layer: Any) -> str:
    """``decoder``, ``decoder_bidirectional`` or ``encoder_only``."""
    return str(getattr(layer.attn_type, "value", layer.attn_type))


def window_of(layer: Any) -> int | None:
    """Tokens before its own that a row of the layer sees, None for all.

    The engine's ``sliding_window_size`` of S shows S + 1 tokens (its torch_native, FlashInfer and
    FA3 backends; the decode of its triton backend shows S), and bidirectional layers have none.
    """
    size = layer.sliding_window_size
    if size is None or size < 0 or attention_kind(layer) != "decoder":
        return None
    return int(size)


def layer_attention(layer: Any) -> LayerAttention:
    """The layer's attention, without its sinks: they come with every call."""
    return LayerAttention(
        sm_scale=float(layer.scaling),
        window=window_of(layer),
        softcap=float(layer.logit_cap) if layer.logit_cap else None,
        causal=attention_kind(layer) == "decoder",
    )
