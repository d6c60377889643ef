"""BF16: the unquantized control, rounded to nearest even, without scales."""

from __future__ import annotations

import torch

from inkling_backend.formats.spec import Format, Quantized, ScaleOrder


def quantize(x: torch.Tensor, global_scale: torch.Tensor | None = None) -> Quantized:
    """``[..., D]`` -> data ``[..., D]`` bf16; no global scale is used."""
    return Quantized(x.detach().to(torch.bfloat16), None)


def dequantize(q: Quantized, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    """float32 of the stored rows."""
    return q.data.float()


BF16 = Format(
    name="bf16",
    codes="bf16",
    element_bits=16,
    block=0,
    one_scale=0,
    has_global_scale=False,
    k_order=ScaleOrder.TOKEN_MAJOR,
    v_order=ScaleOrder.TOKEN_MAJOR,
    quantize=quantize,
    dequantize=dequantize,
)
