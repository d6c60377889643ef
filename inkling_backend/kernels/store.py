"""Fused store: one launch transforms and quantizes Q, K and V and scatters K and V into pages.

A program takes BLOCK_T tokens of one head of K, of V or of Q. Heads are the fast index of the grid,
first those of K, then those of V, then those of Q: neighbours read and write neighbouring memory.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats import RECIPES, Recipe, get_format
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.formats.query import Query
from inkling_backend.kernels.arch import (
    FP8_CAPABILITY,
    MIN_CAPABILITY,
    Capability,
    capability_of,
    converts_to_fp8,
)
from inkling_backend.kernels.checks import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_runs_kernels,
    check_tensor,
)
from inkling_backend.kernels.codec import to_float32
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.encode import encode, store_first, store_rows
from inkling_backend.kernels.side import Side
from inkling_backend.kernels.tile import to_dtype
from inkling_backend.kernels.transform import transform

# The one format of quantized queries.
QUERY_FORMAT = get_format("mxfp8")

# Either gives a thread 16 elements at head_dim 128. Few tokens: programs of one warp, so that the
# launch is wide.
_FEW = 256
_FEW_TOKENS = {"BLOCK_T": 4, "num_warps": 1}
_MANY_TOKENS = {"BLOCK_T": 16, "num_warps": 4}


@triton.jit
def _load_tile(x_ptr, first, head, stride_t, stride_h, mask, SIDE: tl.constexpr):
    """Rows of one head of ``x [T, H, D]`` as `encode` takes them.

    The order of the dimensions is the order in which they are dealt out: eight neighbours to a
    thread, units and then rows to threads, and parts of a unit to the same thread again. So
    a thread holds whole units, and hardly anything moves between threads.
    """
    UNIT: tl.constexpr = 16 if SIDE.block > 0 else 8
    tl.assume(stride_t >= 0)
    tl.assume(stride_h >= 0)
    i_r = tl.arange(0, mask.shape[0])[None, :, None, None].to(tl.int64)
    unit = tl.arange(0, SIDE.pad // UNIT)[:, None, None, None]
    part = tl.arange(0, UNIT // 8)[None, None, :, None]
    o_d = unit * UNIT + part * 8 + tl.arange(0, 8)[None, None, None, :]
    p_x = x_ptr + first * stride_t + head.to(tl.int64) * stride_h + (i_r * stride_t + o_d)
    m_x = mask[None, :, None, None] & (unit < SIDE.dim // UNIT)
    return to_float32(tl.load(p_x, mask=m_x))


@triton.jit
def _store_side(
    x_ptr,
    stride_t,
    stride_h,
    slots_ptr,
    num_slots,
    data_ptr,
    scale_ptr,
    global_ptr,
    center_ptr,
    first_ptr,
    first,
    head,
    m_t,
    SIDE: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """Quantize one head of K or V and write it into its slots."""
    p_slot = slots_ptr + first + tl.arange(0, m_t.shape[0])
    slot = tl.load(p_slot, mask=m_t).to(tl.int64)  # [BLOCK_T]
    # Reading does not wait for the slots.
    x = _load_tile(x_ptr, first, head, stride_t, stride_h, m_t, SIDE)
    x = transform(x, center_ptr, head, SIDE, ROTATES)
    m_t = m_t & (slot > 0) & (slot < num_slots)
    global_scale = tl.load(global_ptr) if global_ptr is not None else 1.0
    data, scale = encode(x, global_scale, SIDE, HARDWARE)
    store_rows(data_ptr, scale_ptr, slot, head, m_t, data, scale, SIDE)
    if SIDE.first > 0:
        store_first(first_ptr, slot, head, m_t, x, global_scale, SIDE)


@triton.jit(do_not_specialize=["num_tokens", "num_slots"])
def store_kernel(
    k_ptr,
    v_ptr,
    q_ptr,
    slots_ptr,
    k_data_ptr,
    v_data_ptr,
    k_scale_ptr,
    v_scale_ptr,
    k_global_ptr,
    v_global_ptr,
    k_center_ptr,
    k_first_ptr,
    v_first_ptr,
    q_data_ptr,
    q_scale_ptr,
    num_tokens,
    num_slots,
    k_stride_t,
    k_stride_h,
    v_stride_t,
    v_stride_h,
    q_stride_t,
    q_stride_h,
    K: tl.constexpr,
    V: tl.constexpr,
    Q: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HARDWARE: tl.constexpr,
    ROTATES: tl.constexpr,
):
    """See the module. K, V: a `Side`. Q: that of a dense cache of query heads, or None."""
    HEADS: tl.constexpr = 2 * K.heads + (Q.heads if Q is not None else 0)
    i_h = tl.program_id(0) % HEADS
    first = (tl.program_id(0) // HEADS).to(tl.int64) * BLOCK_T
    m_t = tl.arange(0, BLOCK_T) < num_tokens - first  # [BLOCK_T]
    if i_h < K.heads:
        _store_side(
            k_ptr,
            k_stride_t,
            k_stride_h,
            slots_ptr,
            num_slots,
            k_data_ptr,
            k_scale_ptr,
            k_global_ptr,
            k_center_ptr,
            k_first_ptr,
            first,
            i_h,
            m_t,
            K,
            HARDWARE,
            ROTATES,
        )
    elif i_h < 2 * K.heads:
        _store_side(
            v_ptr,
            v_stride_t,
            v_stride_h,
            slots_ptr,
            num_slots,
            v_data_ptr,
            v_scale_ptr,
            v_global_ptr,
            None,
            v_first_ptr,
            first,
            i_h - K.heads,
            m_t,
            V,
            HARDWARE,
            False,
        )
    else:
        if Q is not None:
            head = i_h - 2 * K.heads
            x = _load_tile(q_ptr, first, head, q_stride_t, q_stride_h, m_t, Q)
            x = transform(x, None, head, Q, ROTATES)
            if Q.block > 0:
                data, scale = encode(x, 1.0, Q, HARDWARE)
            else:
                scale = None
                data = to_dtype(x, q_data_ptr.dtype.element_ty)
                data = tl.reshape(data, (x.shape[0], x.shape[1], x.shape[2] * 8))
            i_t = first + tl.arange(0, BLOCK_T)
            store_rows(q_data_ptr, q_scale_ptr, i_t, head, m_t, data, scale, Q)


@lru_cache(maxsize=64)
def _constants(
    layout: CacheLayout,
    num_q_heads: int,
    quantize_q: bool,
    rotates: bool,
    few_tokens: bool,
    capability: Capability | None,
) -> dict[str, Any]:
    """Constexprs and launch options; no query heads if Q is not written."""
    k = Side.of(layout, layout.k)
    # Dense rows are pages of one token: the slot is the token.
    q = k._replace(
        fmt=QUERY_FORMAT.name if quantize_q else "",
        codes=QUERY_FORMAT.codes if quantize_q else "",
        block=QUERY_FORMAT.block if quantize_q else 0,
        heads=num_q_heads,
        page=1,
        s_lo=0,
        s_hi=0,
        s_blk=1,
        four_over_six=False,
        first=0,
    )
    return {
        "K": k,
        "V": Side.of(layout, layout.v),
        "Q": q if num_q_heads else None,
        "HARDWARE": capability is not None and converts_to_fp8(capability),
        "ROTATES": rotates,
        **(_FEW_TOKENS if few_tokens else _MANY_TOKENS),
    }


def store(
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    cache: LayerCache,
    *,
    q: torch.Tensor | None = None,
    quantize_q: bool = False,
    q_out: Query | None = None,
) -> Query | None:
    """Write one row of K and V per token into its slot, in one launch; no copy of any input.

    Args:
        k: ``[T, kv heads, Dk]`` bf16, fp16 or fp32; the last dimension contiguous, else strided.
        v: ``[T, kv heads, Dv]`` likewise.
        slots: ``[T]`` int32 or int64, contiguous. A token whose slot is 0 or negative is skipped,
            and so is one beyond the cache, whose rows would land in other memory. Slots must be
            distinct otherwise.
        cache: the layer's buffers.
        q: ``[T, query heads, Dk]`` like k, or None.
        quantize_q: give Q back in MXFP8 (same launch) instead of as it is. Where the cache rotates
            keys, Q is rotated too (same launch), and written in q's dtype or in MXFP8.
        q_out: where the quantized or rotated Q goes, contiguous; allocated if None.

    Returns:
        The query, or None if q is None.

    Raises:
        InvalidTensorError: a tensor does not fit the cache.
    """
    layout, device = cache.layout, cache.k_data.device
    check_runs_kernels("cache.k_data", cache.k_data)
    num_tokens = check_tensor(
        "slots", slots, shape=(None,), dtype=INDEX_DTYPES, device=device, contiguous=True
    ).shape[0]
    heads = layout.num_kv_heads
    _check_rows("k", k, (num_tokens, heads, layout.k_head_dim), device)
    _check_rows("v", v, (num_tokens, heads, layout.v_head_dim), device)
    query, num_q_heads = None, 0
    if q is not None:
        _check_rows("q", q, (num_tokens, None, layout.k_head_dim), device)
        query = Query(q)
        if quantize_q or cache.rotates:
            num_q_heads = q.shape[1]
            query = _query_buffers(q, q_out, quantize_q)
    if num_tokens == 0:
        return query

    constants = _constants(
        layout, num_q_heads, quantize_q, cache.rotates, num_tokens <= _FEW, capability_of(device)
    )
    written = query if num_q_heads and query is not None else Query(k)
    source = q if num_q_heads and q is not None else k
    grid = (triton.cdiv(num_tokens, constants["BLOCK_T"]) * (2 * heads + num_q_heads),)
    store_kernel[grid](
        k_ptr=k,
        v_ptr=v,
        q_ptr=source,
        slots_ptr=slots,
        k_data_ptr=cache.k_data,
        v_data_ptr=cache.v_data,
        k_scale_ptr=cache.k_scale,
        v_scale_ptr=cache.v_scale,
        k_global_ptr=cache.k_global,
        v_global_ptr=cache.v_global,
        k_center_ptr=cache.k_center,
        k_first_ptr=cache.k_first,
        v_first_ptr=cache.v_first,
        q_data_ptr=written.data,
        q_scale_ptr=written.scale,
        num_tokens=num_tokens,
        num_slots=cache.k_data.shape[0],
        k_stride_t=k.stride(0),
        k_stride_h=k.stride(1),
        v_stride_t=v.stride(0),
        v_stride_h=v.stride(1),
        q_stride_t=source.stride(0),
        q_stride_h=source.stride(1),
        **constants,
    )
    return query


def _check_rows(
    name: str, rows: torch.Tensor, shape: tuple[int | None, ...], device: torch.device
) -> None:
    check_tensor(name, rows, shape=shape, dtype=FLOAT_DTYPES, device=device, rows_contiguous=True)


def _query_buffers(q: torch.Tensor, q_out: Query | None, quantize: bool) -> Query:
    """Buffers for the quantized or rotated rows of q."""
    if not quantize:
        data = torch.empty(q.shape, dtype=q.dtype, device=q.device) if q_out is None else q_out.data
        check_tensor(
            "q_out.data", data, shape=q.shape, dtype=q.dtype, device=q.device, contiguous=True
        )
        return Query(data)
    reasons = QUERY_FORMAT.reasons_against(q.shape[-1], "head_dim")
    if reasons:
        raise InvalidTensorError("q", "last size", "that can be quantized", "; ".join(reasons))
    blocks = QUERY_FORMAT.scale_bytes(q.shape[-1])
    if q_out is None:
        return Query(
            torch.empty(q.shape, dtype=torch.uint8, device=q.device),
            torch.empty((*q.shape[:2], blocks), dtype=torch.uint8, device=q.device),
        )
    for name, tensor, shape in (
        ("q_out.data", q_out.data, q.shape),
        ("q_out.scale", q_out.scale, (*q.shape[:2], blocks)),
    ):
        check_tensor(name, tensor, shape=shape, dtype=torch.uint8, device=q.device, contiguous=True)
    return q_out


def compile_cases() -> list[CompileCase]:
    """Every recipe, NVFP4 by both rules: few tokens at a padded head dim, many at the largest,
    where keys are transformed if the recipe takes that; one with sink tokens."""
    recipes = [*RECIPES.values()]
    recipes += [recipe.with_four_over_six() for recipe in recipes if recipe.has_nvfp4]
    shapes = (
        (96, True, MIN_CAPABILITY),
        (256, False, MIN_CAPABILITY),
        (128, False, FP8_CAPABILITY),
    )
    sinks = CacheLayout(recipes[-1].k, recipes[-1].v, 8, 128, 128, sink_tokens=4)
    return [
        _compile_case(sinks, True, FP8_CAPABILITY, True),
        _compile_case(sinks, False, MIN_CAPABILITY, True),
    ] + [
        _compile_case(
            CacheLayout(recipe.k, recipe.v, 8, head_dim, head_dim),
            few,
            oldest,
            transforms,
        )
        for recipe in recipes
        for head_dim, few, oldest in shapes
        for transforms in _transforms(recipe, head_dim)
    ]


def _transforms(recipe: Recipe, head_dim: int) -> tuple[bool, ...]:
    """Whether keys are transformed in the cases of a recipe; the most registers at 256."""
    if recipe.k.name in ("kvfp4", "bf16"):
        return (False,)
    return (True,) if head_dim == 256 else (False, True)


def _compile_case(
    layout: CacheLayout, few_tokens: bool, oldest: Capability, transforms: bool
) -> CompileCase:
    """``transforms``: K centered and rotated, Q rotated, and in BF16 if V is not in MXFP8."""
    names = layout.k.format.name, layout.v.format.name
    quantize_q = names[0] == QUERY_FORMAT.name and not (transforms and names[1] != names[0])
    q_heads = 32 if quantize_q or transforms else 0
    constants = _constants(layout, q_heads, quantize_q, transforms, few_tokens, oldest)
    options = {name: constants[name] for name in constants if name != "num_warps"}
    signature = {f"{x}_ptr": "*bf16" for x in ("k", "v", "q")} | {"slots_ptr": "*i64"}
    for x, side in (("k", layout.k), ("v", layout.v)):
        quantized = side.format.block > 0
        signature[f"{x}_data_ptr"] = "*u8" if quantized else "*bf16"
        signature[f"{x}_scale_ptr"] = "*u8" if quantized else "constexpr"
        signature[f"{x}_global_ptr"] = "*fp32" if side.format.has_global_scale else "constexpr"
    first = "*bf16" if layout.sink_tokens else "constexpr"
    signature |= {"k_first_ptr": first, "v_first_ptr": first}
    signature["k_center_ptr"] = "*fp32" if transforms else "constexpr"
    signature["q_data_ptr"] = "*u8" if quantize_q else "*bf16"
    signature["q_scale_ptr"] = "*u8" if quantize_q else "constexpr"
    signature |= {"num_tokens": "i32", "num_slots": "i64"}
    signature |= {f"{x}_stride_{y}": "i32:16" for x in ("k", "v", "q") for y in ("t", "h")}
    for name, kind in signature.items():
        if kind == "constexpr":
            options[name] = None
    tokens = "few" if few_tokens else "many"
    transformed = "-transformed" if transforms else ""
    if layout.v.format.four_over_six:
        transformed += "-fouroversix"
    if layout.sink_tokens:
        transformed += "-first"
    return CompileCase(
        name=f"store-{names[0]}-{names[1]}-d{layout.k_head_dim}-{tokens}{transformed}",
        kernel=store_kernel,
        signature=signature,
        constexprs=options,
        num_warps=constants["num_warps"],
        capability=oldest,
    )
