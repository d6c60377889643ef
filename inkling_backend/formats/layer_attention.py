"""What one layer of a model asks of attention, beside the shapes that all layers share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from inkling_backend.errors import InvalidTensorError


@dataclass(frozen=True)
class LayerAttention:
    """One layer's attention; the defaults are plain causal attention.

    The logit of a query and a key is ``softcap * tanh(sm_scale * q @ k / softcap)``, or
    ``sm_scale * q @ k`` without a soft-cap; then a relative bias is added.

    Attributes:
        sm_scale: positive factor of the logits.
        window: tokens before its own that a row sees, so ``window + 1`` in all; None for every one.
            This is SGLang's ``sliding_window_size`` and FlashInfer's ``window_left``.
        softcap: positive bound of the logits (Gemma 2); None for none.
        causal: whether a row sees no token after its own; otherwise it sees all of its request.
        sinks: ``[query heads]``, any float dtype, on the device of the cache: a logit that takes
            part in the softmax of every row and has no value (GPT-OSS); None for none.
        bias: ``[T, query heads, extent]``, any float dtype, the last dimension dense: what is added
            to the logit of a row and a key that stands ``d`` tokens before it, ``0 <= d < extent``
            (Inkling, the engine's ``relative_bias_score_mod``); None for none. It comes with every
            call: T is the rows of the query.

    Raises:
        InvalidTensorError: a value out of range, or a window of attention that is not causal.
    """

    sm_scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    sinks: torch.Tensor | None = field(default=None, compare=False)
    bias: torch.Tensor | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.sm_scale < math.inf:
            raise InvalidTensorError("sm_scale", "a value", "positive and finite", self.sm_scale)
        if self.softcap is not None and not 0.0 < self.softcap < math.inf:
            raise InvalidTensorError("softcap", "a value", "positive and finite", self.softcap)
        if self.window is not None and (self.window < 0 or not self.causal):
            got = f"{self.window}, causal={self.causal}"
            raise InvalidTensorError("window", "0 or more tokens of", "causal attention", got)

    def check_sinks(self, num_q_heads: int) -> None:
        """Raise InvalidTensorError unless there is one sink for each query head, or none."""
        sinks = self.sinks
        if sinks is None:
            return
        if tuple(sinks.shape) != (num_q_heads,) or not sinks.is_contiguous():
            got = f"{tuple(sinks.shape)} with strides {sinks.stride()}"
            raise InvalidTensorError("sinks", "contiguous shape", (num_q_heads,), got)
        if not sinks.is_floating_point() or sinks.dtype == torch.float64:
            raise InvalidTensorError("sinks", "dtype", "float32, bfloat16 or float16", sinks.dtype)

    def check_bias(self, rows: int, num_q_heads: int) -> None:
        """Raise InvalidTensorError unless there is a bias for each row and query head, or none."""
        bias = self.bias
        if bias is None:
            return
        if bias.ndim != 3 or bias.shape[:2] != (rows, num_q_heads) or not bias.shape[2]:
            want = f"[{rows}, {num_q_heads}, 1 or more]"
            raise InvalidTensorError("bias", "shape", want, tuple(bias.shape))
        if bias.stride(2) != 1 and bias.shape[2] > 1:
            raise InvalidTensorError("bias", "a last stride of", 1, bias.stride())
        if not bias.is_floating_point() or bias.dtype == torch.float64:
            raise InvalidTensorError("bias", "dtype", "float32, bfloat16 or float16", bias.dtype)
