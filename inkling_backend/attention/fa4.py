"""Attention by FlashAttention 4's block-scaled kernel, straight from our pages. SM100 alone.

Pages of 128 tokens and heads of 128 in MXFP8 are its operands as they are: E4M3 codes, and scales
in the order of its BlockScaledBasicChunk. Q comes in MXFP8 from the launch that stores K and V.
What it computes is its own: probabilities and V in bfloat16, no promise about bits or about NaN.

Source: ``flash_attn_varlen_func`` of SGLang's copy of FA4, arguments ``sfq``, ``sfk`` and ``sfv``.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels.arch import Capability, runs_fa4

HEAD_DIM, PAGE_SIZE = 128, 128


class Attend(Protocol):
    """FA4's ``flash_attn_varlen_func``, as far as it is used."""

    def __call__(self, **arguments: Any) -> torch.Tensor: ...


def reasons_against(spec: AttentionSpec, capability: Capability | None) -> list[str]:
    """Every reason why FA4 cannot read the pages of such a model (empty if it can).

    Args:
        capability: compute capability of the GPU, None on a machine without one.
    """
    layout, reasons = spec.layout, []
    if capability is None or not runs_fa4(capability):
        have = "no GPU" if capability is None else "{}.{}".format(*capability)
        reasons.append(f"FA4's block-scaled kernel runs on SM100 alone (10.x), not on {have}")
    formats = (layout.k_format.name, layout.v_format.name)
    if formats != ("mxfp8", "mxfp8") or not spec.quantize_query:
        reasons.append(
            f"FA4 multiplies Q and K in MXFP8 over V in MXFP8, but K and V are {formats[0]} and "
            f"{formats[1]}, Q is {'mxfp8' if spec.quantize_query else spec.dtype}"
        )
    dims = (layout.k_head_dim, layout.v_head_dim)
    if dims != (HEAD_DIM, HEAD_DIM) or layout.page_size != PAGE_SIZE:
        reasons.append(
            f"FA4 reads heads of {HEAD_DIM} in pages of {PAGE_SIZE}, but head_dim of K and V is "
            f"{dims[0]} and {dims[1]}, the page size {layout.page_size}"
        )
    if spec.relative_bias:
        reasons.append("FA4 is not given the relative bias of this model's logits")
    if layout.sink_tokens:
        reasons.append(
            f"FA4 reads pages alone, not the rows of {layout.sink_tokens} sink tokens beside them"
        )
    if spec.dtype != torch.bfloat16:
        reasons.append(f"FA4 writes bfloat16, but the model is {spec.dtype}")
    return reasons


def operands(query: Query, cache: LayerCache) -> dict[str, torch.Tensor]:
    """Views of Q and of one layer's pages as FA4 names and types them.

    Returns:
        q ``[T, query heads, D]``, k and v ``[pages, page size, kv heads, D]`` float8_e4m3fn; sfq
        ``[T, query heads, D / 32]``, sfk and sfv, whose order FA4 knows, float8_e8m0fnu.
    """
    assert query.scale is not None
    assert cache.k_scale is not None
    assert cache.v_scale is not None
    codes, scales = torch.float8_e4m3fn, torch.float8_e8m0fnu
    return {
        "q": query.data.view(codes),
        "k": cache.k_data.view(codes).unflatten(0, (-1, PAGE_SIZE)),
        "v": cache.v_data.view(codes).unflatten(0, (-1, PAGE_SIZE)),
        "sfq": query.scale.view(scales),
        "sfk": cache.k_scale.view(scales),
        "sfv": cache.v_scale.view(scales),
    }


def masks(layer: LayerAttention) -> dict[str, Any]:
    """What a layer asks for, as FA4 names it."""
    return {
        "softmax_scale": layer.sm_scale,
        "causal": layer.causal,
        "softcap": layer.softcap,
        "window_size": (-1, -1) if layer.window is None else (layer.window, 0),
        "sinks": None if layer.sinks is None else layer.sinks.to(torch.bfloat16),
    }
