"""Attention libraries found on the host, called as their own documentation says.

Each peer reads pages of the same geometry in its own format, with the same requests in the same
random pages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from inkling_backend.bench import gate
from inkling_backend.bench.cases import DECODE, Case
from inkling_backend.bench.data import Batch, Lab
from inkling_backend.bench.timing import Launch
from inkling_backend.formats.layout import LayerCache

# Modules of the peers.
FLASHINFER, FA3 = LIBRARIES = ("flashinfer", "flash_attn_interface")

_FP8 = torch.float8_e4m3fn
WORKSPACE_BYTES = 512 << 20
# FP8 without scales rounds every element to three bits of mantissa, for FA3 the queries too.
_FP8_BOUND = 0.15


@dataclass(frozen=True)
class Pages:
    """Pages of every layer in a peer's format; scales are those of NVFP4."""

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    scales: list[torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """What a peer is called with.

    Attributes:
        q: ``[B * new tokens, query heads, D]`` bfloat16.
        pages: one of a layer: ``[pages, page size, kv heads, D]`` (NVFP4: D / 2 bytes).
    """

    lab: Lab
    case: Case
    batch: Batch
    q: torch.Tensor
    pages: Pages


Build = Callable[[Inputs], Launch]


@dataclass(frozen=True)
class Peer:
    """One way to attend.

    Attributes:
        name: key in a row's ``peers``.
        element: dtype of its pages; uint8 is NVFP4.
        bound: of its relative error against the reference over BF16 pages; None where its pages
            hold other numbers.
        decode, extend: make a call a layer ready; None where it has none.
    """

    name: str
    element: torch.dtype
    bound: float | None
    decode: Build | None
    extend: Build | None

    def build(self, op: str) -> Build | None:
        """For an operation."""
        return self.decode if op == DECODE else self.extend


def _page_counts(batch: Batch, page: int) -> torch.Tensor:
    return (batch.seq_lens + page - 1) // page


def _flashinfer_tables(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(indptr, indices, length of the last page), int32 on the device."""
    batch, page = inputs.batch, inputs.case.heads.page_size
    counts = _page_counts(batch, page)
    indptr = torch.zeros(len(batch.lens) + 1, dtype=torch.int32, device=counts.device)
    indptr[1:] = counts.cumsum(0)
    columns = torch.arange(batch.page_table.shape[1], device=counts.device)
    indices = batch.page_table[columns < counts[:, None]].contiguous()
    return indptr, indices, (batch.seq_lens - 1) % page + 1


def _workspace(inputs: Inputs) -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=inputs.lab.device)


def _flashinfer_decode(inputs: Inputs, backend: str) -> Launch:
    flashinfer: Any = importlib.import_module(FLASHINFER)
    heads, q, pages = inputs.case.heads, inputs.q, inputs.pages
    indptr, indices, last = _flashinfer_tables(inputs)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(inputs),
        "NHD",
        use_tensor_cores=True,
        use_cuda_graph=True,
        paged_kv_indptr_buffer=indptr.clone(),
        paged_kv_indices_buffer=indices.clone(),
        paged_kv_last_page_len_buffer=last.clone(),
        backend=backend,
    )
    wrapper.plan(
        *(indptr, indices, last, heads.q_heads, heads.kv_heads, heads.head_dim, heads.page_size),
        q_data_type=q.dtype,
        kv_data_type=pages.k[0].dtype,
    )

    def launch(i: int) -> torch.Tensor:
        if pages.scales:
            scales = (pages.scales[i], pages.scales[i])
            return wrapper.run(q, (pages.k[i], pages.v[i]), kv_cache_sf=scales)
        return wrapper.run(q, (pages.k[i], pages.v[i]))

    return launch


def _flashinfer_extend(inputs: Inputs) -> Launch:
    flashinfer: Any = importlib.import_module(FLASHINFER)
    heads, q, pages = inputs.case.heads, inputs.q, inputs.pages
    indptr, indices, last = _flashinfer_tables(inputs)
    # "auto" is its FA3 on SM90 for BF16, and FA2 for what that does not serve.
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        _workspace(inputs), "NHD", backend="auto"
    )
    wrapper.plan(
        *(inputs.batch.qo_indptr, indptr, indices, last),
        *(heads.q_heads, heads.kv_heads, heads.head_dim, heads.page_size),
        causal=True,
        q_data_type=q.dtype,
        kv_data_type=pages.k[0].dtype,
    )
    # Given, because what it allocates itself it fills with zeros first.
    out = torch.empty_like(q)
    return lambda i: wrapper.run(q, (pages.k[i], pages.v[i]), out=out)


def _fa3(inputs: Inputs) -> Launch:
    attend: Any = importlib.import_module(FA3).flash_attn_with_kvcache
    batch, pages, heads = inputs.batch, inputs.pages, inputs.case.heads
    shape = (len(batch.lens), batch.new_tokens, heads.q_heads, heads.head_dim)
    q = inputs.q.view(shape).to(pages.k[0].dtype)
    scales: dict[str, torch.Tensor] = {}
    if q.dtype == _FP8:
        one = torch.ones(len(batch.lens), heads.kv_heads, device=q.device)
        scales = {"q_descale": one, "k_descale": one, "v_descale": one}

    def launch(i: int) -> torch.Tensor:
        out = attend(
            q,
            pages.k[i],
            pages.v[i],
            cache_seqlens=batch.seq_lens,
            page_table=batch.page_table,
            causal=True,
            **scales,
        )
        return out.view(-1, heads.q_heads, heads.head_dim)

    return launch


PEERS = (
    Peer(
        *("flashinfer_bf16", torch.bfloat16, gate.ATTENTION_BOUND),
        partial(_flashinfer_decode, backend="auto"),
        _flashinfer_extend,
    ),
    Peer("fa3_bf16", torch.bfloat16, gate.ATTENTION_BOUND, _fa3, _fa3),
    Peer(
        *("flashinfer_fp8", _FP8, _FP8_BOUND),
        partial(_flashinfer_decode, backend="auto"),
        _flashinfer_extend,
    ),
    Peer("fa3_fp8", _FP8, _FP8_BOUND, _fa3, _fa3),
    Peer(
        *("flashinfer_nvfp4", torch.uint8, None),
        partial(_flashinfer_decode, backend="fa2"),
        None,
    ),
)


def make_pages(lab: Lab, peer: Peer, source: list[LayerCache], case: Case) -> Pages:
    """Enough layers for a peer, from those of a BF16 pool."""
    heads = case.heads
    shape = (-1, heads.page_size, heads.kv_heads, heads.head_dim)
    k, v = ([getattr(c, name).view(shape) for c in source] for name in ("k_data", "v_data"))
    if peer.element == torch.bfloat16:
        return Pages(k, v, [])
    per_layer = k[0].numel() * 2
    if peer.element == _FP8:
        count = lab.layers(per_layer, rotate=case.rotates)
        k8, v8 = ([x[i % len(x)].to(_FP8) for i in range(count)] for x in (k, v))
        return Pages(k8, v8, [])
    count = lab.layers(per_layer * 9 // 16, rotate=case.rotates)
    codes = (*k[0].shape[:3], heads.head_dim // 2)
    blocks = (*k[0].shape[:3], heads.head_dim // 16)

    def random_codes() -> list[torch.Tensor]:
        new = partial(torch.randint, 0, 256, codes, dtype=torch.uint8, device=lab.device)
        return [new() for _ in range(count)]

    scales = [torch.rand(blocks, device=lab.device).add_(0.1).to(_FP8) for _ in range(count)]
    return Pages(random_codes(), random_codes(), scales)
