"""Stand-ins for FlashInfer and FA3 that attend in plain torch, from the tables they are given."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal: ``[n, Hq, D]``, ``[L, Hkv, D]`` twice -> ``[n, Hq, D]``."""
    n, length, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    logits = torch.einsum("nhd,thd->hnt", q.float(), k) * q.shape[2] ** -0.5
    seen = torch.arange(length) <= (torch.arange(n) + length - n)[:, None]
    p = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("hnt,thd->nhd", p, v).bfloat16()


class _Wrapper:
    """What decode and prefill share."""

    extend = False

    def __init__(self, workspace: torch.Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        assert not bool(workspace.any())
        self.options = options

    def plan(self, *arguments: Any, **options: Any) -> None:
        tables = list(arguments)
        self.qo_indptr = tables.pop(0) if self.extend else None
        self.indptr, self.indices, self.last, *self.sizes = tables
        assert options.get("causal", False) is self.extend
        self.dtypes = options["q_data_type"], options["kv_data_type"]

    def run(
        self,
        q: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor],
        kv_cache_sf: Any = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert (q.dtype, pages[0].dtype) == self.dtypes
        _, _, head_dim, page = self.sizes
        if pages[0].dtype == torch.uint8:
            assert kv_cache_sf[0].shape == (*pages[0].shape[:3], head_dim // 16)
            assert pages[0].shape[3] == head_dim // 2
            return torch.zeros_like(q)
        parts = []
        for b in range(len(self.last)):
            used = self.indices[self.indptr[b] : self.indptr[b + 1]]
            length = (len(used) - 1) * page + int(self.last[b])
            k, v = (side[used].flatten(0, 1)[:length] for side in pages)
            first, last = (b, b + 1) if self.qo_indptr is None else self.qo_indptr[b : b + 2]
            parts.append(attend(q[first:last], k, v))
        return torch.cat(parts) if out is None else out.copy_(torch.cat(parts))


class _Prefill(_Wrapper):
    extend = True


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    causal: bool,
    **scales: torch.Tensor,
) -> torch.Tensor:
    assert causal
    assert len(scales) == (3 if q.dtype == torch.float8_e4m3fn else 0)
    rows = [
        attend(q[b], k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n])
        for b, (pages, n) in enumerate(zip(page_table, cache_seqlens, strict=True))
    ]
    return torch.stack(rows)


def install(patch: pytest.MonkeyPatch) -> None:
    """Put both in place of whatever is installed."""
    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchDecodeWithPagedKVCacheWrapper = _Wrapper  # type: ignore[attr-defined]
    flashinfer.BatchPrefillWithPagedKVCacheWrapper = _Prefill  # type: ignore[attr-defined]
    fa3 = ModuleType("flash_attn_interface")
    fa3.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    patch.setitem(sys.modules, "flashinfer", flashinfer)
    patch.setitem(sys.modules, "flash_attn_interface", fa3)
