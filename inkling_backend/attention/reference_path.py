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
    # Nothing is split.
    split_rules = None

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
        slot_map: torch.Tensor | None,
        tree: torch.Tensor | None,
    ) -> DecodePlan:
        pages, lens, mapped = self._tables(slot_table, rows[:batch], seq_lens[:batch], slot_map)
        return DecodePlan(batch, q_len, pages, lens, None, mapped, tree)

    def plan_extend(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        qo_indptr: torch.Tensor,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        slot_map: torch.Tensor | None,
    ) -> ExtendPlan:
        pages, lens, mapped = self._tables(slot_table, rows, seq_lens, slot_map)
        return ExtendPlan(
            rows.shape[0],
            max(q_lens, default=0),
            pages,
            lens,
            qo_indptr.to(torch.int32),
            mapped_table=mapped,
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
            qo_indptr, tree = plan.qo_indptr, None
        else:
            qo_indptr = torch.arange(plan.batch + 1, device=out.device) * plan.q_len
            tree = None if plan.tree is None else plan.tree.flatten()
        pages, lens = plan.page_table, plan.seq_lens
        attend(query, cache, pages, lens, qo_indptr, layer=layer, out=out, tree=tree)

    def _tables(
        self,
        slot_table: torch.Tensor,
        rows: torch.Tensor,
        seq_lens: torch.Tensor,
        slot_map: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(page table, lengths, mapped table) as `kernels.plan` makes them."""
        lens = seq_lens.clamp(0, self._max_context).to(torch.int32)
        slots = slot_table[rows.long(), : self._max_context : self._page].clamp(min=0)
        starts = torch.arange(slots.shape[1], device=slots.device) * self._page
        # Beyond a request's length the slot table may hold anything.
        slots = torch.where(starts < lens[:, None], slots, 0)
        mapped = None
        if slot_map is not None:
            mapped = (slot_map[slots.long()].clamp(min=0) // self._page).to(torch.int32)
        return (slots // self._page).to(torch.int32), lens, mapped
