"""The FA4 implementation behind `AttentionRunner`: plans and stores in Triton, attends with FA4."""

from __future__ import annotations

import torch

from inkling_backend.attention.fa4 import Attend, masks, operands
from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.attention.triton_path import TritonPath
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels.arch import Capability


class Fa4Path(TritonPath):
    """Plans and stores as `TritonPath` does, attends with FA4."""

    def __init__(
        self,
        attend: Attend,
        spec: AttentionSpec,
        max_batch: int,
        max_context: int,
        max_q_len: int,
        device: torch.device,
        *,
        capability: Capability | None,
        maps_slots: bool,
    ) -> None:
        super().__init__(
            *(spec, max_batch, max_context, max_q_len, device),
            capability=capability,
            flashinfer=False,
            maps_slots=maps_slots,
        )
        self._attend = attend
        # First query rows in decode; a buffer for each length, because graphs keep their address.
        rows = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._decode_indptr = {q_len: rows * q_len for q_len in {1, max_q_len}}

    @property
    def kernels(self) -> str:
        return "fa4 (SM100)"

    @property
    def workspace_bytes(self) -> int:
        return super().workspace_bytes + sum(t.nbytes for t in self._decode_indptr.values())

    def run(
        self,
        plan: DecodePlan | ExtendPlan,
        query: Query,
        cache: LayerCache,
        out: torch.Tensor,
        layer: LayerAttention,
    ) -> None:
        if isinstance(plan, ExtendPlan):
            indptr, most = plan.qo_indptr, plan.max_q_len
        else:
            assert plan.tree is None, "FA4 has no mask among new tokens"
            indptr, most = self._decode_indptr[plan.q_len][: plan.batch + 1], plan.q_len
        arguments = operands(query, cache) | masks(layer)
        out.copy_(
            self._attend(
                **arguments,
                cu_seqlens_q=indptr,
                max_seqlen_q=most,
                seqused_k=plan.seq_lens,
                page_table=plan.page_table,
            )
        )
