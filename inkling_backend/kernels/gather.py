"""Dequantized rows of chosen slots: for debugging, and for callers that ask for K or V buffers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inkling_backend.errors import InvalidTensorError, UnknownNameError
from inkling_backend.formats import FORMATS
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.kernels.checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_runs_kernels,
    check_tensor,
)
from inkling_backend.kernels.codec import load_rows, to_bf16
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.side import Side

BLOCK_T = 16


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def gather_kernel(
    data_ptr,
    scale_ptr,
    global_ptr,
    slots_ptr,
    out_ptr,
    num_tokens,
    num_slots,
    SIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """BLOCK_T tokens of one head: tokens on grid x, heads on grid y."""
    i_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)  # [BLOCK_T]
    head = tl.program_id(1)
    m_t = i_t < num_tokens
    slot = tl.load(slots_ptr + i_t, mask=m_t, other=0).to(tl.int64)
    held = m_t & (slot > 0) & (slot < num_slots)
    x = load_rows(data_ptr, scale_ptr, slot, head, held, SIDE, WIDE=True)  # [BLOCK_T, pad]
    if global_ptr is not None:
        # A row that is not held stays zero whatever the scale is.
        x = tl.where(held[:, None], x * tl.load(global_ptr), 0.0)
    o_d = tl.arange(0, SIDE.pad)
    p_out = out_ptr + ((i_t * SIDE.heads + head) * SIDE.dim)[:, None] + o_d[None, :]
    m_out = m_t[:, None] & (o_d < SIDE.dim)[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(p_out, to_bf16(x), mask=m_out)
    else:
        tl.store(p_out, x.to(out_ptr.dtype.element_ty), mask=m_out)


def gather(
    slots: torch.Tensor,
    cache: LayerCache,
    side: str = "k",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Rows of the given slots, dequantized, the global scale included.

    Args:
        slots: ``[T]`` int32 or int64, contiguous. A slot of 0, a negative one and one beyond the
            cache give zeros.
        cache: the layer's buffers.
        side: ``"k"`` or ``"v"``.
        dtype: bfloat16, float16 or float32, rounded to nearest even.

    Returns:
        ``[T, kv heads, D]``.

    Raises:
        InvalidTensorError: slots or dtype do not fit.
        UnknownNameError: side is neither "k" nor "v".
    """
    if side not in ("k", "v"):
        raise UnknownNameError("side", side, ("k", "v"))
    if dtype not in FLOAT_DTYPES:
        allowed = " or ".join(map(str, FLOAT_DTYPES))
        raise InvalidTensorError("the result", "dtype", allowed, dtype)
    check_runs_kernels("cache.k_data", cache.k_data)
    check_tensor(
        "slots",
        slots,
        shape=(None,),
        dtype=INDEX_DTYPES,
        device=cache.k_data.device,
        contiguous=True,
    )
    layout = cache.layout
    geometry = layout.k if side == "k" else layout.v
    shape = (slots.shape[0], layout.num_kv_heads, geometry.head_dim)
    out = torch.empty(shape, dtype=dtype, device=slots.device)
    if slots.shape[0] == 0:
        return out
    data, scale, global_scale = (
        (cache.k_data, cache.k_scale, cache.k_global)
        if side == "k"
        else (cache.v_data, cache.v_scale, cache.v_global)
    )
    gather_kernel[(triton.cdiv(slots.shape[0], BLOCK_T), layout.num_kv_heads)](
        data_ptr=data,
        scale_ptr=scale,
        global_ptr=global_scale,
        slots_ptr=slots,
        out_ptr=out,
        num_tokens=slots.shape[0],
        num_slots=data.shape[0],
        SIDE=Side.of(layout, geometry),
        BLOCK_T=BLOCK_T,
    )
    return out


def compile_cases() -> list[CompileCase]:
    """Every format, at a padded head dim."""
    return [_compile_case(CacheLayout(f, f, 8, 96, 96)) for f in FORMATS.values()]


def _compile_case(layout: CacheLayout) -> CompileCase:
    number_format = layout.k.format
    quantized, scaled = number_format.block > 0, number_format.has_global_scale
    signature = {
        "data_ptr": "*u8" if quantized else "*bf16",
        "scale_ptr": "*u8" if quantized else "constexpr",
        "global_ptr": "*fp32" if scaled else "constexpr",
        "slots_ptr": "*i64",
        "out_ptr": "*bf16",
        "num_tokens": "i32",
        "num_slots": "i64",
    }
    constants = {"SIDE": Side.of(layout, layout.k), "BLOCK_T": BLOCK_T}
    constants |= {name: None for name, kind in signature.items() if kind == "constexpr"}
    return CompileCase(f"gather-{number_format.name}", gather_kernel, signature, constants)
