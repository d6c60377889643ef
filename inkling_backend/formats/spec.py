"""Frozen descriptors of the number formats: the single source of truth about their bits.

A format says how one row of ``head_dim`` numbers becomes bytes: an element code, and one scale
byte for each block of neighbouring elements. Nothing else in the package derives these facts from
a dtype or a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch


class Quantized(NamedTuple):
    """Rows in a cache format.

    data:  ``[..., head_dim * element_bits // 8]`` uint8, or ``[..., head_dim]`` bf16 for BF16.
    scale: ``[..., head_dim // block]`` uint8, or None for a format without scales.
    """

    data: torch.Tensor
    scale: torch.Tensor | None


class ScaleOrder(Enum):
    """Order of the scale bytes inside one (page, head), token t and block b of ``sf`` blocks.

    FA4:  ``(t % 32) * (page/32) * sf + (t // 32) * sf + b``, the BlockScaledBasicChunk order.
           At head_dim 128 and page 128 it is byte for byte what FA4's SM100 kernel reads.
    TOKEN_MAJOR: ``t * sf + b``, one token's scales are neighbours.
    BLOCK_MAJOR: ``b * page + t``, one block's scales of all tokens are neighbours.
    """

    FA4 = "fa4"
    TOKEN_MAJOR = "token_major"
    BLOCK_MAJOR = "block_major"

    def strides(self, page_size: int, blocks: int) -> tuple[int, int, int]:
        """Byte strides of ``t % 32``, ``t // 32`` and ``b``; every order is linear in these."""
        if self is ScaleOrder.FA4:
            return (page_size // 32) * blocks, blocks, 1
        if self is ScaleOrder.TOKEN_MAJOR:
            return blocks, 32 * blocks, 1
        return 1, 32, page_size


QuantizeFn = Callable[[torch.Tensor, torch.Tensor | None], Quantized]
DequantizeFn = Callable[[Quantized, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Format:
    """One number format of the cache.

    Attributes:
        name: the name used in flags, logs and results, by which the store knows the rule.
        codes: what the bytes mean, by which kernels read them: the element code, and that of the
            scales. Formats that differ in blocks or in the choice of scales alone have the same.
        element_bits: bits of one element code.
        block: neighbouring elements along head_dim that share one scale byte; 0 = no scales.
        one_scale: the scale byte of 1.0.
        has_global_scale: whether a float32 scale per layer multiplies every value.
        k_order, v_order: order of the scale bytes in K and in V pages.
        quantize: ``(x[..., head_dim], global_scale) -> Quantized``, exact, any device.
        dequantize: ``(Quantized, global_scale) -> float32 [..., head_dim]``, exact, any device.
        four_over_six: whether ``quantize`` scales a block to the peak, 4 or 6, that errs less.
    """

    name: str
    codes: str
    element_bits: int
    block: int
    one_scale: int
    has_global_scale: bool
    k_order: ScaleOrder
    v_order: ScaleOrder
    quantize: QuantizeFn
    dequantize: DequantizeFn
    four_over_six: bool = False

    def data_bytes(self, head_dim: int) -> int:
        """Bytes of one row's element codes."""
        return head_dim * self.element_bits // 8

    def scale_bytes(self, head_dim: int) -> int:
        """Bytes of one row's scales."""
        return head_dim // self.block if self.block else 0

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one row of one head, scales included."""
        return self.data_bytes(head_dim) + self.scale_bytes(head_dim)

    @property
    def bits_per_element(self) -> float:
        """Bits per element, scales included (the global scale is not counted)."""
        return self.element_bits + (8 / self.block if self.block else 0)

    @property
    def data_dtype(self) -> torch.dtype:
        """dtype of the data buffer: uint8 for packed codes, bfloat16 for BF16."""
        return torch.uint8 if self.element_bits < 16 else torch.bfloat16

    def reasons_against(self, head_dim: int, what: str) -> list[str]:
        """Why rows of ``head_dim`` cannot be stored in this format (empty if they can)."""
        step = self.block or 16
        if head_dim % step or not 0 < head_dim <= 256:
            return [
                f"{what} {head_dim} does not fit {self.name}: it must be a multiple of {step} "
                f"of at most 256"
            ]
        return []
