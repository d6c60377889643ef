"""The plain-torch implementation behind `AttentionRunner`: any device, exact, not fast."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.reference.attention import attend
from inkling_backend.reference.store import store


class ReferencePath:
    """Plans are fresh tensors; nothing is held between calls."""

    workspace_bytes = 0
    kernels = "plain torch (reference)"

    def __init__(self, spec: AttentionSpec, max_context: int) -> None:
        self._page = spec.layout.page_size
        self._max_context = max_context

    def prepare(self, layers: Iterable[LayerAttention]) -> None:
        """Nothing is compiled."""

    def plan_decode(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        batch: int,
        q_len: int,
    ) -> DecodePlan:
        page_table, seq_lens = self._tables(slot_table, rows[:batch], seq_lens[:batch])
        return DecodePlan(batch, q_len, page_table, seq_lens, None)

    def plan_extend(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
    ) -> ExtendPlan:
        page_table, seq_lens = self._tables(slot_table, rows, seq_lens)
        max_q_len = max(q_lens, default=0)
        return ExtendPlan(rows.shape[0], max_q_len, page_table, seq_lens, qo_indptr.to(torch.int32))

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
            qo_indptr = plan.qo_indptr
        else:
            qo_indptr = torch.arange(plan.batch + 1, device=out.device) * plan.q_len
        attend(query, cache, plan.page_table, plan.seq_lens, qo_indptr, layer=layer, out=out)

    def _tables(
        self, slot_table: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(page table, lengths) as `kernels.plan` makes them."""
        first_slots = slot_table[rows.long(), : self._max_context : self._page]
        pages = first_slots.clamp(min=0) // self._page
        return pages.to(torch.int32), seq_lens.clamp(0, self._max_context).to(torch.int32)
