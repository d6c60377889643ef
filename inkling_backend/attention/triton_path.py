"""The Triton implementation behind `AttentionRunner`: graph-stable buffers around the kernels.

Imported only where it is used: importing it needs Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inkling_backend.attention.flashinfer_extend import FlashInferExtend, serves
from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels import plan as planner
from inkling_backend.kernels.arch import Capability
from inkling_backend.kernels.configs import split_rule
from inkling_backend.kernels.decode import DecodeCall, Partial, decode
from inkling_backend.kernels.decode_fast import decode_fast, fits
from inkling_backend.kernels.extend import extend
from inkling_backend.kernels.merge import merge
from inkling_backend.kernels.plan import WorkList
from inkling_backend.kernels.store import store


class TritonPath:
    """Buffers are allocated once, apart for decode and extend.

    So a captured decode graph finds its plan and its partial results where they were, whatever
    was extended in between.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        max_batch: int,
        max_context: int,
        device: torch.device,
        *,
        capability: Capability | None,
        flashinfer: bool,
    ) -> None:
        """
        Args:
            capability: compute capability of the GPU, None for the interpreter.
            flashinfer: `flashinfer_extend.chosen`.
        """
        layout = spec.layout
        self._page = layout.page_size
        self._max_context = max_context
        fast = fits(layout, spec.group, spec.dtype, capability)
        self._decode = decode_fast if fast else decode
        self._rule = split_rule(spec.num_q_heads, layout, max_batch, max_context, chunked=fast)
        items = self._rule.most_items
        max_pages = -(-max_context // layout.page_size)

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._decode_pages = ints(max_batch, max_pages)
        self._decode_lens = ints(max_batch)
        self._work = WorkList(ints(max_batch + 1), ints(1), ints(items, 4))
        self._extend_pages = ints(max_batch, max_pages)
        self._extend_lens = ints(max_batch)
        self._qo_indptr = ints(max_batch + 1)

        self._partial = Partial.empty(items, spec.num_q_heads, layout.v_head_dim, device)

        self._flashinfer: FlashInferExtend | None = None
        if flashinfer:
            self._flashinfer = FlashInferExtend(spec, max_batch, max_context, device)

    @property
    def kernels(self) -> str:
        """Names of the attention kernels chosen."""
        prefill = "extend" if self._flashinfer is None else "flashinfer fa3"
        return f"triton {self._decode.__name__} and {prefill}"

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all buffers held."""
        tensors = [t for t in vars(self).values() if isinstance(t, torch.Tensor)]
        own = sum(t.nbytes for t in (*tensors, *self._work, *self._partial))
        return own + (0 if self._flashinfer is None else self._flashinfer.workspace_bytes)

    def plan_decode(
        self, slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, batch: int
    ) -> DecodePlan:
        planner.plan_decode(
            slot_table,
            rows,
            seq_lens,
            batch=batch,
            page_size=self._page,
            max_context=self._max_context,
            rule=self._rule,
            page_table=self._decode_pages,
            seq_lens_out=self._decode_lens,
            work=self._work,
        )
        return DecodePlan(batch, self._decode_pages[:batch], self._decode_lens[:batch], self._work)

    def plan_extend(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
    ) -> ExtendPlan:
        batch = rows.shape[0]
        rounds = () if self._flashinfer is None else self._flashinfer.plan(q_lens, kv_lens)
        planner.plan_extend(
            slot_table,
            rows,
            seq_lens,
            qo_indptr,
            batch=batch,
            page_size=self._page,
            max_context=self._max_context,
            page_table=self._extend_pages,
            seq_lens_out=self._extend_lens,
            qo_indptr_out=self._qo_indptr,
        )
        return ExtendPlan(
            batch,
            max(q_lens, default=0),
            self._extend_pages[:batch],
            self._extend_lens[:batch],
            self._qo_indptr[: batch + 1],
            rounds,
        )

    def store(
        self,
        cache: LayerCache,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        q: torch.Tensor | None,
        *,
        quantize_query: bool,
    ) -> Query | None:
        return store(k, v, slots, cache, q=q, quantize_q=quantize_query)

    def run(
        self,
        plan: DecodePlan | ExtendPlan,
        query: Query,
        cache: LayerCache,
        out: torch.Tensor,
        layer: LayerAttention,
    ) -> None:
        if isinstance(plan, ExtendPlan):
            if self._flashinfer is not None and serves(layer):
                self._flashinfer.run(plan, query, cache, out, layer)
                return
            extend(
                query,
                cache,
                page_table=plan.page_table,
                seq_lens=plan.seq_lens,
                qo_indptr=plan.qo_indptr,
                batch=plan.batch,
                max_q_len=plan.max_q_len,
                out=out,
                layer=layer,
            )
            return
        assert plan.work is not None
        call = DecodeCall(
            query,
            cache,
            plan.page_table,
            plan.seq_lens,
            plan.work,
            plan.batch,
            self._partial,
            out,
            layer,
        )
        self._decode(call)
        merge(call)
