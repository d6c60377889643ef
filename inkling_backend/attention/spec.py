"""What a model asks of attention, and every reason why it cannot have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_backend.formats import Format, get_format
from inkling_backend.formats.layout import PAGE_SIZES, CacheLayout, page_size_reason
from inkling_backend.kernels.arch import MIN_CAPABILITY, Capability, supports
from inkling_backend.kernels.configs import MAX_GROUP

MODEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionSpec:
    """The attention of one model, the same for all its layers.

    Attributes:
        num_q_heads: query heads on this device.
        layout: geometry of its cache; holds the KV heads and head sizes.
        dtype: of queries and outputs, bfloat16 or float16.
        quantize_query: whether Q becomes MXFP8 in the launch that stores K and V.
        relative_bias: whether its layers bring a `LayerAttention.bias`.
    """

    num_q_heads: int
    layout: CacheLayout
    dtype: torch.dtype
    quantize_query: bool
    relative_bias: bool = False

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_q_heads // self.layout.num_kv_heads


def requirements(spec: AttentionSpec, capability: Capability | None, q_len: int = 1) -> list[str]:
    """Every reason why this attention cannot run (empty if it can).

    Args:
        capability: compute capability of the GPU, None on a machine without one.
        q_len: query tokens that decode has of each request.
    """
    layout = spec.layout
    return reasons_against(
        num_q_heads=spec.num_q_heads,
        num_kv_heads=layout.num_kv_heads,
        k_format=layout.k_format,
        v_format=layout.v_format,
        k_head_dim=layout.k_head_dim,
        v_head_dim=layout.v_head_dim,
        page_size=layout.page_size,
        dtype=spec.dtype,
        quantize_query=spec.quantize_query,
        capability=capability,
        q_len=q_len,
    )


def reasons_against(
    *,
    num_q_heads: int,
    num_kv_heads: int,
    k_format: Format,
    v_format: Format,
    k_head_dim: int,
    v_head_dim: int,
    page_size: int,
    dtype: torch.dtype,
    quantize_query: bool,
    capability: Capability | None,
    q_len: int = 1,
) -> list[str]:
    """`requirements` before there is a layout, which refuses some of these by an exception.

    ``q_len``: query tokens that decode has of each request.
    """
    reasons = CacheLayout.reasons_against(k_format, v_format, k_head_dim, v_head_dim, page_size)
    if page_size not in PAGE_SIZES and page_size_reason(page_size) not in reasons:
        reasons.append(page_size_reason(page_size))
    if num_kv_heads < 1 or num_q_heads < 1 or num_q_heads % num_kv_heads:
        reasons.append(
            f"{num_q_heads} query heads are no multiple of {num_kv_heads} KV heads: "
            f"use a model (or a tensor-parallel size) where they are"
        )
    elif num_q_heads // num_kv_heads > MAX_GROUP:
        reasons.append(
            f"{num_q_heads // num_kv_heads} query heads share one KV head: at most {MAX_GROUP} may"
        )
    elif not 1 <= q_len <= MAX_GROUP // (num_q_heads // num_kv_heads):
        reasons.append(
            f"{q_len} query tokens of {num_q_heads // num_kv_heads} heads a KV head are asked of "
            f"decode: at least 1 and at most {MAX_GROUP} rows together are supported"
        )
    if dtype not in MODEL_DTYPES:
        names = " or ".join(str(d).removeprefix("torch.") for d in MODEL_DTYPES)
        reasons.append(f"model dtype {dtype} is not supported: set --dtype to {names}")
    if quantize_query:
        query = get_format("mxfp8").reasons_against(k_head_dim, "head_dim of the quantized query")
        # The same fault of K, in the same format, has been named above.
        reasons += [] if k_format.name == "mxfp8" else query
    if capability is not None and not supports(capability):
        have, need = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        reasons.append(f"the GPU has compute capability {have}: {need} (Ampere) or newer is needed")
    return reasons
