"""Plans: what a batch looks like, on the device, computed once and used by every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from inkling_backend.attention.staging import Round
from inkling_backend.formats.layout import CacheLayout

if TYPE_CHECKING:  # importing it needs Triton
    from inkling_backend.kernels.plan import WorkList


@dataclass(frozen=True)
class DecodePlan:
    """The same number of new tokens in each request: one, or the few that speculation verifies.

    Attributes:
        batch: requests, on the host.
        q_len: new tokens of each request, on the host.
        page_table: ``[batch, max_pages]`` int32, on the device; a request's row is valid up to its
            length.
        seq_lens: ``[batch]`` int32, on the device, new tokens included. 0 for a row that is
            padding: its output is zero.
        work: what the decode kernels have to do; None for the reference implementation.
        mapped_table: pages of the same tokens in another pool, as ``page_table``; page 0 where
            there is none. None without a slot map.
        others: plans of the same batch for layers of these layouts (`attention.mixed`).
        tree: ``[batch, q_len]`` int64, on the device: bit j of a new token's word says whether it
            sees the j-th. None: they are causal among themselves.
    """

    batch: int
    q_len: int
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    work: WorkList | None
    mapped_table: torch.Tensor | None = None
    tree: torch.Tensor | None = None
    others: Mapping[CacheLayout, DecodePlan] | None = None

    def mapped(self) -> DecodePlan:
        """The same batch for layers whose pages lie in the other pool."""
        others = self.others and {layout: plan.mapped() for layout, plan in self.others.items()}
        table = _there(self.mapped_table)
        return replace(self, page_table=table, mapped_table=None, others=others)


@dataclass(frozen=True)
class ExtendPlan:
    """Several new tokens per request.

    Attributes:
        batch: requests, on the host.
        max_q_len: no request has more new tokens; on the host.
        page_table: ``[batch, max_pages]`` int32, on the device.
        seq_lens: ``[batch]`` int32, on the device, new tokens included.
        qo_indptr: ``[batch + 1]`` int32, on the device: a request's first query row.
        rounds: on the host; empty where nothing attends over copies.
        mapped_table: as in `DecodePlan`.
    """

    batch: int
    max_q_len: int
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    rounds: tuple[Round, ...] = ()
    mapped_table: torch.Tensor | None = None

    def mapped(self) -> ExtendPlan:
        """The same batch for layers whose pages lie in the other pool."""
        return replace(self, page_table=_there(self.mapped_table), mapped_table=None)


def _there(mapped_table: torch.Tensor | None) -> torch.Tensor:
    assert mapped_table is not None, "planned without a slot map"
    return mapped_table
