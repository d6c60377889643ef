"""The Triton implementation behind `AttentionRunner`: graph-stable buffers around the kernels.

Imported only where it is used: importing it needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from inkling_backend.attention.flashinfer_extend import FlashInferExtend, serves
from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels import plan as planner
from inkling_backend.kernels.arch import Capability
from inkling_backend.kernels.configs import (
    SplitRule,
    chunked_split_rule,
    persistent_programs,
    split_rule,
)
from inkling_backend.kernels.decode import DecodeCall, Partial, decode
from inkling_backend.kernels.decode_fast import config_for, decode_fast
from inkling_backend.kernels.extend import extend
from inkling_backend.kernels.merge import merge
from inkling_backend.kernels.plan import WorkList
from inkling_backend.kernels.store import store


class _Decoder(NamedTuple):
    """The decode kernel for some number of query tokens, and how it wants its work cut."""

    decode: Callable[[DecodeCall], None]
    rule: SplitRule

    @classmethod
    def choose(
        cls,
        spec: AttentionSpec,
        max_batch: int,
        max_context: int,
        q_len: int,
        *,
        device: torch.device,
        capability: Capability | None,
    ) -> _Decoder:
        layout = spec.layout
        config = None
        if not spec.relative_bias:
            config = config_for(layout, spec.group, q_len, spec.dtype, capability)
        sizes = (spec.num_q_heads * q_len, layout, max_batch, max_context)
        if config is None:
            return cls(decode, split_rule(*sizes))
        programs = persistent_programs(config, device)
        return cls(decode_fast, chunked_split_rule(*sizes, config, programs))


class _DecodeBuffers(NamedTuple):
    """What plans of one split rule fill, and where their splits leave results."""

    pages: torch.Tensor
    lens: torch.Tensor
    mapped: torch.Tensor
    work: WorkList
    partial: Partial


class _ExtendBuffers(NamedTuple):
    """What plans of extend fill."""

    pages: torch.Tensor
    lens: torch.Tensor
    mapped: torch.Tensor
    qo_indptr: torch.Tensor


class TritonPath:
    """Buffers are allocated once, apart for decode and extend.

    So a captured decode graph finds its plan and its partial results where they were, whatever
    was extended in between.
    """

    _decode: _DecodeBuffers
    _extend: _ExtendBuffers
    _flashinfer: FlashInferExtend | None

    def __init__(
        self,
        spec: AttentionSpec,
        max_batch: int,
        max_context: int,
        max_q_len: int,
        device: torch.device,
        *,
        capability: Capability | None,
        flashinfer: bool,
        maps_slots: bool = False,
        like: TritonPath | None = None,
    ) -> None:
        """
        Args:
            capability: compute capability of the GPU, None for the interpreter.
            flashinfer: `flashinfer_extend.chosen`.
            maps_slots: whether plans come with a slot map.
            like: the path of the same model's layers of another layout, with the same arguments
                otherwise. They take turns, so its buffers are used: those of extend, whose plans
                no layout changes, and those of decode if the split rules are the same.
        """
        layout = spec.layout
        self._page = layout.page_size
        self._max_context = max_context
        self._decoders = {
            q_len: _Decoder.choose(
                *(spec, max_batch, max_context, q_len), device=device, capability=capability
            )
            for q_len in {1, max_q_len}
        }
        max_pages = -(-max_context // layout.page_size)
        mapped = (max_batch, max_pages) if maps_slots else (0, 0)
        self._own_bytes = 0

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        if like is not None and like.split_rules == self.split_rules:
            self._decode = like._decode
        else:
            items = max(each.rule.most_items for each in self._decoders.values())
            rows = max(each.rule.most_items * q_len for q_len, each in self._decoders.items())
            self._decode = _DecodeBuffers(
                ints(max_batch, max_pages),
                ints(max_batch),
                ints(*mapped),
                WorkList.empty(items, max_batch, device),
                Partial.empty(rows, spec.num_q_heads, layout.v_head_dim, device),
            )
            *tables, work, partial = self._decode
            self._own_bytes += sum(t.nbytes for t in (*tables, *work, *partial))
        if like is not None:
            self._extend, self._flashinfer = like._extend, like._flashinfer
            return
        self._extend = _ExtendBuffers(
            ints(max_batch, max_pages), ints(max_batch), ints(*mapped), ints(max_batch + 1)
        )
        self._own_bytes += sum(t.nbytes for t in self._extend)
        self._flashinfer = None
        if flashinfer:
            self._flashinfer = FlashInferExtend(spec, max_batch, max_context, device)
            self._own_bytes += self._flashinfer.workspace_bytes

    def prepare(self, layers: Iterable[LayerAttention]) -> None:
        if self._flashinfer is not None:
            self._flashinfer.prepare(layers)

    @property
    def split_rules(self) -> dict[int, SplitRule]:
        """How the work of some number of query tokens is cut."""
        return {q_len: decoder.rule for q_len, decoder in self._decoders.items()}

    @property
    def kernels(self) -> str:
        """Names of the attention kernels chosen."""
        names = dict.fromkeys(each.decode.__name__ for each in self._decoders.values())
        prefill = "extend" if self._flashinfer is None else "flashinfer fa3"
        return f"triton {', '.join(names)} and {prefill}"

    @property
    def workspace_bytes(self) -> int:
        """Bytes of all buffers held, those of another path not counted."""
        return self._own_bytes

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
        mapped = None if slot_map is None else planner.Mapped(slot_map, self._decode.mapped)
        planner.plan_decode(
            slot_table,
            rows,
            seq_lens,
            batch=batch,
            page_size=self._page,
            max_context=self._max_context,
            rule=self._decoders[q_len].rule,
            page_table=self._decode.pages,
            seq_lens_out=self._decode.lens,
            work=self._decode.work,
            mapped=mapped,
        )
        pages, lens = self._decode.pages[:batch], self._decode.lens[:batch]
        there = None if mapped is None else mapped.page_table[:batch]
        return DecodePlan(batch, q_len, pages, lens, self._decode.work, there, tree)

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
        batch = rows.shape[0]
        mapped = None if slot_map is None else planner.Mapped(slot_map, self._extend.mapped)
        rounds = () if self._flashinfer is None else self._flashinfer.plan(q_lens, kv_lens)
        planner.plan_extend(
            slot_table,
            rows,
            seq_lens,
            qo_indptr,
            batch=batch,
            page_size=self._page,
            max_context=self._max_context,
            page_table=self._extend.pages,
            seq_lens_out=self._extend.lens,
            qo_indptr_out=self._extend.qo_indptr,
            mapped=mapped,
        )
        return ExtendPlan(
            batch,
            max(q_lens, default=0),
            self._extend.pages[:batch],
            self._extend.lens[:batch],
            self._extend.qo_indptr[: batch + 1],
            rounds,
            None if mapped is None else mapped.page_table[:batch],
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
            marks = None
            if self._flashinfer is not None and serves(layer):
                marks = self._flashinfer.run(plan, query, cache, out, layer)
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
                marks=marks,
            )
            return
        assert plan.work is not None
        decoder = self._decoders[plan.q_len]
        call = DecodeCall(
            query,
            cache,
            plan.page_table,
            plan.seq_lens,
            plan.work,
            plan.batch,
            self._decode.partial,
            out,
            layer,
            plan.q_len,
            plan.tree,
            decoder.rule.split_chunks,
        )
        decoder.decode(call)
        merge(call)
