"""Attention of a draft model that proposes a chain of tokens, one step after another.

The engine wants a backend of its own for every step and tells all of them at once that a chain
begins. The steps share the draft runner's backend and its buffers: each plans anew when its first
layer attends, in a captured graph as well.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from inkling_backend.engines.sglang.backend import InklingAttnBackend


class DraftStep(AttentionBackend):
    """One token after ``ahead - 1`` others that the batch's lengths do not count either."""

    needs_cpu_seq_lens = False

    def __init__(self, backend: InklingAttnBackend, ahead: int) -> None:
        super().__init__()
        self._backend, self._ahead = backend, ahead
        self._planned = False
        self.prefill_attention_backend_str = backend.prefill_attention_backend_str
        self.decode_attention_backend_str = backend.decode_attention_backend_str

    def begin(self) -> None:
        """Another chain begins: its batch has no plan yet."""
        self._planned = False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """As of the backend."""
        return self._backend.get_cuda_graph_seq_len_fill_value()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One drafted token per request: ``[B, query heads * Dk]`` -> ``[B, query heads * Dv]``."""
        if not self._planned:
            self._backend.plan_decode(forward_batch, self._ahead)
            self._planned = True
        return self._backend.forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)


class DraftSteps(AttentionBackend):
    """The steps of a chain but the last, whose token is proposed and not read.

    Attributes:
        attn_backends: `DraftStep` of each, where the engine looks for them.
    """

    needs_cpu_seq_lens = False

    def __init__(self, backend: InklingAttnBackend, steps: int) -> None:
        """
        Args:
            steps: tokens of a chain.
        """
        super().__init__()
        self._backend = backend
        self.attn_backends = [DraftStep(backend, ahead) for ahead in range(1, steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """A chain begins."""
        for step in self.attn_backends:
            step.begin()

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """As of the backend."""
        self._backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A chain begins, here for graphs that leave attention to Python."""
        self.init_forward_metadata(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """A chain begins; its steps plan where the graph records them."""
        self.init_forward_metadata(forward_batch)
