"""The older V cache whose MXFP8 scales span 32 neighbouring slots of one element.

Plain torch for every device, with fixed shapes and no host synchronisation. Rows that must not be
written cannot be left out of a scatter of fixed shape. They repeat another row's write instead, or
write back what is there, so that every address gets one definite value.
"""

from __future__ import annotations

import torch

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats.elements import decode_e4m3, encode_e4m3, finite_or_zero
from inkling_backend.formats.mxfp8 import BLOCK, block_scale, encode_scaled

# Elements rescaled at a time, which bounds the memory of a long append.
_MAX_ELEMENTS = 1 << 23


def append_rows(
    v: torch.Tensor, loc: torch.Tensor, v_cache: torch.Tensor, sfv: torch.Tensor
) -> None:
    """See `inkling_backend.compat.update_mxfp8_v_cache_seqblocked`."""
    _check_inputs(v, loc, v_cache, sfv)
    n = v.shape[0]
    if n == 0:
        return
    page_size = v_cache.shape[1]

    # Sort tokens by block, padding last. Then each block is a run of tokens.
    loc = loc.long()
    order = torch.where(loc < 0, torch.iinfo(torch.int64).max, loc).argsort(stable=True)
    loc, v = loc[order], v.detach().float()[order]
    valid = loc >= 0
    any_valid = valid[0]
    # Padding repeats the first token.
    loc = torch.where(valid, loc, loc[:1].clamp(min=0))
    v = torch.where(valid[:, None, None], v, v[:1])
    block = loc // BLOCK
    starts = torch.zeros_like(block)
    starts[1:] = (block[1:] != block[:-1]) & valid[1:]
    run = torch.where(valid, starts.cumsum(0), 0)  # [N], the run of each token

    # Everything below is per run, [N, ...]; runs that do not exist repeat run 0.
    runs = torch.arange(n, device=v.device)
    live = runs <= run.amax()
    repeat = torch.where(live, runs, 0)
    run_block = torch.zeros_like(block).scatter_(0, run, block)[repeat]
    first_slot = (loc % BLOCK == 0).long()
    fresh = torch.zeros_like(block).scatter_reduce_(0, run, first_slot, "amax")[repeat] > 0
    token_scale = block_scale(finite_or_zero(v).abs()).int()  # [N, H, D]
    index = run[:, None, None].expand_as(token_scale)
    run_scale = torch.zeros_like(token_scale).scatter_reduce_(0, index, token_scale, "amax")

    page, part = run_block * BLOCK // page_size, run_block * BLOCK % page_size // BLOCK
    stored = sfv[page, :, :, part].int()  # [N, H, D]
    old = torch.where(fresh[:, None, None], 0, stored)
    new = torch.maximum(old, run_scale[repeat])
    _rescale(v_cache, run_block, old, new, live, any_valid)

    data = v_cache.view(torch.uint8)
    slot_page, slot = loc // page_size, loc % page_size
    codes = encode_scaled(v, new[run].to(torch.uint8))
    data[slot_page, slot] = torch.where(any_valid, codes, data[slot_page, slot])
    sfv[page, :, :, part] = torch.where(any_valid, new, stored).to(torch.uint8)


def _rescale(
    v_cache: torch.Tensor,
    run_block: torch.Tensor,
    old: torch.Tensor,
    new: torch.Tensor,
    live: torch.Tensor,
    any_valid: torch.Tensor,
) -> None:
    """Bring the stored codes of every live run's block from scale ``old`` to scale ``new``."""
    n, num_heads, dim = old.shape
    page_size = v_cache.shape[1]
    data = v_cache.view(torch.uint8)
    offsets = torch.arange(BLOCK, device=old.device)
    step = max(1, _MAX_ELEMENTS // (BLOCK * num_heads * dim))
    for start in range(0, n, step):
        # Live runs come first. A dead one repeats the first of its chunk; if that is dead too,
        # the whole chunk is, and it writes back what it reads.
        chunk = torch.arange(start, min(start + step, n), device=old.device)
        chunk_live = live[start] & any_valid
        chunk = torch.where(live[chunk], chunk, start)
        slots = run_block[chunk][:, None] * BLOCK + offsets  # [C, 32]
        page, slot = slots // page_size, slots % page_size
        codes = data[page, slot]  # [C, 32, H, D]
        # 2**-126 already takes every code to zero, and is still a normal number.
        shift = (old[chunk] - new[chunk]).clamp(min=-126)
        factor = ((shift + 127) << 23).view(torch.float32)[:, None]  # [C, 1, H, D]
        scaled = encode_e4m3(decode_e4m3(codes) * factor)
        data[page, slot] = torch.where(chunk_live, scaled, codes)


def _check_inputs(
    v: torch.Tensor, loc: torch.Tensor, v_cache: torch.Tensor, sfv: torch.Tensor
) -> None:
    if v.ndim != 3:
        raise InvalidTensorError("v", "shape", "[N, kv heads, D]", tuple(v.shape))
    n, num_heads, dim = v.shape
    if not v.dtype.is_floating_point:
        raise InvalidTensorError("v", "dtype", "bf16, fp16 or fp32", v.dtype)
    if tuple(loc.shape) != (n,) or loc.dtype not in (torch.int32, torch.int64):
        got = f"{tuple(loc.shape)} {loc.dtype}"
        raise InvalidTensorError("loc", "int32 or int64 of shape", (n,), got)
    if v_cache.ndim != 4 or tuple(v_cache.shape[2:]) != (num_heads, dim):
        expected = f"[pages, page_size, {num_heads}, {dim}]"
        raise InvalidTensorError("v_cache", "shape", expected, tuple(v_cache.shape))
    if v_cache.dtype != torch.float8_e4m3fn:
        raise InvalidTensorError("v_cache", "dtype", torch.float8_e4m3fn, v_cache.dtype)
    pages, page_size = v_cache.shape[:2]
    if page_size % BLOCK:
        raise InvalidTensorError("v_cache", "page_size a multiple of", BLOCK, page_size)
    if tuple(sfv.shape) != (pages, num_heads, dim, page_size // BLOCK):
        expected_sfv = (pages, num_heads, dim, page_size // BLOCK)
        raise InvalidTensorError("sfv", "shape", expected_sfv, tuple(sfv.shape))
    if sfv.dtype != torch.uint8:
        raise InvalidTensorError("sfv", "dtype", torch.uint8, sfv.dtype)
    for name, tensor in (("loc", loc), ("v_cache", v_cache), ("sfv", sfv)):
        if tensor.device != v.device:
            raise InvalidTensorError(name, "device", v.device, tensor.device)
