"""Query rows as attention reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inkling_backend.formats.mxfp8 import MXFP8
from inkling_backend.formats.spec import Quantized


class Query(NamedTuple):
    """Query rows ``[T, query heads, Dk]``.

    data:  bf16 or fp16 as the model gave them, tokens at any stride, or uint8 E4M3 codes.
    scale: None, or for E4M3 codes the dense E8M0 scales ``[T, query heads, Dk / 32]`` uint8.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def row_stride(self) -> int:
        """Elements from one token's row to the next, as kernels take it."""
        # Where there is one row its stride says nothing.
        tokens, heads, dim = self.data.shape
        return self.data.stride(0) if tokens > 1 else heads * dim

    @property
    def has_dense_rows(self) -> bool:
        """Whether the heads of a token follow each other, as kernels want it; rows of a slice of a
        fused QKV projection do. Quantized rows are dense among themselves, too."""
        heads, dim = self.data.shape[1:]
        if self.scale is not None:
            return self.data.is_contiguous() and self.scale.is_contiguous()
        return (dim == 1 or self.data.stride(2) == 1) and (heads == 1 or self.data.stride(1) == dim)

    @classmethod
    def quantize(cls, q: torch.Tensor) -> Query:
        """Rows in MXFP8, the one format of quantized queries."""
        return cls(*MXFP8.quantize(q, None))

    def dequantize(self) -> torch.Tensor:
        """float32 ``[T, query heads, Dk]``."""
        if self.scale is None:
            return self.data.float()
        return MXFP8.dequantize(Quantized(self.data, self.scale), None)
