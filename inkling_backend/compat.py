"""Stand-alone quantization helpers under their established public names.

For code that quantizes KV caches by itself, without this package's pool and attention: MXFP8
quantize, dequantize and fused store, the older sequence-blocked V cache, and the FP4 utilities. All
of them take CPU and CUDA tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from inkling_backend import env
from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats import FP4KVCacheRecipe, Quantized, get_format
from inkling_backend.formats.elements import E2M1_MAX, E4M3_MAX
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.reference.seqblocked import append_rows
from inkling_backend.reference.store import store as reference_store

__all__ = [
    "E2M1_MAX",
    "MAX_BLOCK_SCALE_FP8",
    "MXFP8_BLOCK_SIZE",
    "BlockFP4KVQuantizeUtil",
    "FP4KVCacheRecipe",
    "MXFP8Tensor",
    "NVFP4KVQuantizeUtil",
    "from_mxfp8",
    "quant_store_kv_mxfp8",
    "to_mxfp8",
    "update_mxfp8_v_cache_seqblocked",
]

_MXFP8 = get_format("mxfp8")
_KVFP4 = get_format("kvfp4")
_NVFP4 = get_format("nvfp4")

MXFP8_BLOCK_SIZE = _MXFP8.block
MAX_BLOCK_SCALE_FP8 = E4M3_MAX


class MXFP8Tensor(NamedTuple):
    """data ``[..., D]`` float8_e4m3fn and scale ``[..., D / 32]`` uint8 (E8M0)."""

    data: torch.Tensor
    scale: torch.Tensor


def to_mxfp8(x: torch.Tensor) -> MXFP8Tensor:
    """Quantize the last dimension into E4M3 values plus E8M0 scale bytes.

    Raises:
        InvalidTensorError: a ValueError; the last dimension is not a multiple of 32.
    """
    data, scale = _MXFP8.quantize(x, None)
    assert scale is not None
    return MXFP8Tensor(data.view(torch.float8_e4m3fn), scale)


def from_mxfp8(x: MXFP8Tensor, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values of ``x`` in ``out_dtype``, rounded once.

    Raises:
        InvalidTensorError: data is not float8_e4m3fn or uint8, or scale is not one byte per block.
    """
    data, scale = _bytes("data", x.data), _bytes("scale", x.scale)
    _check_scales("scale", scale, (*data.shape[:-1], data.shape[-1] // MXFP8_BLOCK_SIZE))
    return _MXFP8.dequantize(Quantized(data, scale), None).to(out_dtype)


def quant_store_kv_mxfp8(
    k: torch.Tensor,
    v: torch.Tensor,
    loc: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sfk: torch.Tensor,
    sfv: torch.Tensor,
    page_size: int = 128,
) -> None:
    """Quantize K and V rows to MXFP8 and scatter them into a paged cache, in one launch on a GPU.

    Args:
        k, v: ``[T, kv heads, D]`` bf16, fp16 or fp32 with unit stride along D.
        loc: ``[T]`` int32 or int64 slots; 0 and negative slots are skipped.
        k_cache, v_cache: contiguous ``[..., kv heads, D]`` float8_e4m3fn or uint8 holding whole
            pages of slots.
        sfk, sfv: contiguous, one byte per block, uint8 or float8_e8m0fnu of any shape; the order
            is ``(page, head, slot % 32, slot % page_size // 32, block)``.
        page_size: slots per page, a power of two from 32 on.

    Raises:
        InvalidTensorError: a ValueError naming the tensor that does not fit.
        UnsupportedError: head_dim or page_size cannot be served.
    """
    if k.ndim != 3:
        raise InvalidTensorError("k", "shape", "[T, kv heads, D]", tuple(k.shape))
    for name, rows in (("k", k), ("v", v)):
        if tuple(rows.shape) != tuple(k.shape):
            raise InvalidTensorError(name, "shape", tuple(k.shape), tuple(rows.shape))
        if rows.stride(2) != 1:
            raise InvalidTensorError(name, "unit stride along D, not", rows.shape, rows.stride())
    heads, dim = k.shape[1:]
    layout = CacheLayout(_MXFP8, _MXFP8, heads, dim, dim, page_size)
    page_items = page_size * heads * dim
    if k_cache.numel() % page_items:
        raise InvalidTensorError("k_cache", "a multiple of", page_items, k_cache.numel())
    pages = k_cache.numel() // page_items
    cache = LayerCache(
        layout,
        k_data=_as_buffer("k_cache", k_cache, layout.data_shape(layout.k, pages)),
        v_data=_as_buffer("v_cache", v_cache, layout.data_shape(layout.v, pages)),
        k_scale=_as_buffer("sfk", sfk, layout.scale_shape(layout.k, pages)),
        v_scale=_as_buffer("sfv", sfv, layout.scale_shape(layout.v, pages)),
    )
    if env.implementation(k_cache.device.type) == "triton":
        from inkling_backend.kernels.store import store as kernel_store

        kernel_store(k, v, loc, cache)
    else:
        reference_store(k, v, loc, cache)


def update_mxfp8_v_cache_seqblocked(
    v: torch.Tensor,
    loc: torch.Tensor,
    v_cache: torch.Tensor,
    sfv: torch.Tensor,
) -> None:
    """Append V rows to a sequence-blocked MXFP8 cache: one scale per 32 slots and element.

    Incremental appends equal quantizing the whole block at once: scale bytes exactly, data up to
    double rounding of subnormals. A write to a block's first slot forgets the block's old scale.
    Fixed shapes and no host synchronisation, so it can be captured in a CUDA graph.

    Args:
        v: ``[N, kv heads, D]`` bf16, fp16 or fp32 new rows.
        loc: ``[N]`` int32 or int64 distinct slots; negative slots are padding and skipped.
        v_cache: ``[pages, page_size, kv heads, D]`` float8_e4m3fn.
        sfv: ``[pages, kv heads, D, page_size / 32]`` uint8 E8M0, zeros when allocated.

    Raises:
        InvalidTensorError: a ValueError naming the tensor that does not fit.
    """
    append_rows(v, loc, v_cache, sfv)


class BlockFP4KVQuantizeUtil:
    """KVFP4: E2M1 in blocks of 16 neighbours with one power-of-two scale each."""

    @staticmethod
    def batched_quantize(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[B, M, N]`` -> packed codes ``[B, M, N / 2]`` and scales ``[B, M * N / 16]``, uint8.

        Raises:
            InvalidTensorError: not three dimensions, N odd, or M * N no multiple of 16.
        """
        b, m, n = _check_3d("tensor", tensor)
        if n % 2:
            raise InvalidTensorError("tensor", "last dimension a multiple of", 2, n)
        data, scale = _KVFP4.quantize(tensor.reshape(b, m * n), None)
        assert scale is not None
        return data.view(b, m, n // 2), scale

    @staticmethod
    def batched_dequantize(
        quant_tensor: torch.Tensor,
        scale_factors: torch.Tensor,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """Inverse of `batched_quantize`: ``[B, M, N]`` in ``dtype``, rounded once.

        Raises:
            InvalidTensorError: codes or scales do not have the shapes of `batched_quantize`.
        """
        b, m, half = _check_3d("quant_tensor", quant_tensor)
        data = _bytes("quant_tensor", quant_tensor).reshape(b, m * half)
        scale = _bytes("scale_factors", scale_factors)
        _check_scales("scale_factors", scale, (b, 2 * m * half // _KVFP4.block))
        values = _KVFP4.dequantize(Quantized(data, scale), None)
        return values.view(b, m, 2 * half).to(dtype)


class NVFP4KVQuantizeUtil:
    """NVFP4: E2M1 in blocks of 16 with E4M3 scales and a global float32 scale.

    ``value = code * block_scale * global_scale``, on any device.
    """

    @staticmethod
    def quantize(
        tensor: torch.Tensor, global_scale: torch.Tensor | float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantize.

        Args:
            tensor: ``[B, M, N]`` bf16, fp16 or fp32, N a multiple of 16.
            global_scale: positive; a number, a scalar tensor or a tensor of one element.

        Returns:
            ``(codes [B, M, N / 2] uint8, scales [B, M, N / 16] float8_e4m3fn, global scale [1])``.

        Raises:
            InvalidTensorError: tensor or global_scale has another shape.
        """
        _check_3d("tensor", tensor)
        g = _global_scale(global_scale, tensor.device)
        data, scale = _NVFP4.quantize(tensor, g.float())
        assert scale is not None
        return data, scale.view(torch.float8_e4m3fn), g

    @staticmethod
    def dequantize(
        quant_tensor: torch.Tensor,
        block_scales: torch.Tensor,
        global_scale: torch.Tensor | float,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """Inverse of `quantize`: ``[B, M, N]`` in ``dtype``, rounded once.

        Raises:
            InvalidTensorError: codes, scales or global_scale do not fit each other.
        """
        b, m, half = _check_3d("quant_tensor", quant_tensor)
        g = _global_scale(global_scale, quant_tensor.device)
        data, scale = _bytes("quant_tensor", quant_tensor), _bytes("block_scales", block_scales)
        _check_scales("block_scales", scale, (b, m, 2 * half // _NVFP4.block))
        return _NVFP4.dequantize(Quantized(data, scale), g.float()).to(dtype)


def _bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as uint8; its dtype has to have one byte per element."""
    if tensor.dtype.itemsize != 1:
        raise InvalidTensorError(name, "a dtype of one byte,", "uint8 or float8", tensor.dtype)
    return tensor.view(torch.uint8)


def _as_buffer(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A uint8 view of a contiguous tensor in ``shape``."""
    if not tensor.is_contiguous():
        raise InvalidTensorError(name, "strides", "contiguous", tensor.stride())
    expected = torch.Size(shape).numel()
    if tensor.numel() != expected:
        raise InvalidTensorError(name, "bytes in all", expected, tuple(tensor.shape))
    return _bytes(name, tensor).view(shape)


def _check_scales(name: str, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(scale.shape) != shape:
        raise InvalidTensorError(name, "shape", shape, tuple(scale.shape))


def _check_3d(name: str, tensor: torch.Tensor) -> tuple[int, int, int]:
    if tensor.ndim != 3:
        raise InvalidTensorError(name, "shape", "[B, M, N]", tuple(tensor.shape))
    b, m, n = tensor.shape
    return b, m, n


def _global_scale(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.tensor([value], dtype=torch.float32, device=device)
    if value.numel() != 1:
        raise InvalidTensorError("global_scale", "elements", 1, tuple(value.shape))
    if value.device != device:
        raise InvalidTensorError("global_scale", "device", device, value.device)
    return value.reshape(1)
