"""Query rows as attention reads them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from inkling_backend.formats.mxfp8 import MXFP8
from inkling_backend.formats.spec import Quantized


class Query(NamedTuple):
    """Query rows ``[T, query heads, Dk]``.

    data:  bf16 or fp16 as the model gave them, or uint8 E4M3 codes.
    scale: None, or for E4M3 codes the dense E8M0 scales ``[T, query heads, Dk / 32]`` uint8.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None

    @classmethod
    def quantize(cls, q: torch.Tensor) -> Query:
        """Rows in MXFP8, the one format of quantized queries."""
        return cls(*MXFP8.quantize(q, None))

    def dequantize(self) -> torch.Tensor:
        """float32 ``[T, query heads, Dk]``."""
        if self.scale is None:
            return self.data.float()
        return MXFP8.dequantize(Quantized(self.data, self.scale), None)
