"""FA4 over our pages: a stand-in that reads them by FA4's own contract, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, LayerAttention
from inkling_backend.attention.fa4 import reasons_against
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.reference import attend
from tests.attention.world import World, make_world

SM100 = (10, 0)
LENS = [1, 130, 257, 40]


def _dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    assert codes.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float8_e8m0fnu
    return codes.float() * scales.float().repeat_interleave(32, -1)


def _unchunk(scales: torch.Tensor) -> torch.Tensor:
    """``[pages, heads, 512]`` in 32 x 4 x 4 chunks -> ``[pages, 128, heads, 4]``.

    BlockScaledBasicChunk: token t and block b lie at ``(t % 32) * 16 + t // 32 * 4 + b``.
    """
    pages, heads, _ = scales.shape
    bytes_ = scales.view(torch.uint8).view(pages, heads, 32, 4, 4)
    dense = bytes_.permute(0, 3, 2, 1, 4).reshape(pages, 128, heads, 4)
    return dense.contiguous().view(torch.float8_e8m0fnu)


def standin(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    softcap: float | None,
    window_size: tuple[int, int],
    sinks: torch.Tensor | None,
    sfq: torch.Tensor,
    sfk: torch.Tensor,
    sfv: torch.Tensor,
) -> torch.Tensor:
    """``flash_attn_varlen_func`` of FA4 in plain torch; rows beyond the batch are garbage."""
    assert cu_seqlens_q.dtype == seqused_k.dtype == page_table.dtype == torch.int32
    assert page_table.shape[0] == len(seqused_k) == len(cu_seqlens_q) - 1
    queries = _dequantize(q, sfq)
    keys, values = _dequantize(k, _unchunk(sfk)), _dequantize(v, _unchunk(sfv))
    out = torch.full(q.shape, 7.0, dtype=torch.bfloat16, device=q.device)
    group = q.shape[1] // k.shape[2]
    for b, length in enumerate(seqused_k.tolist()):
        first, last = cu_seqlens_q[b : b + 2].tolist()
        assert last - first <= max_seqlen_q
        if not length:
            continue
        pages = page_table[b, : -(-length // 128)].long()
        key = keys[pages].flatten(0, 1)[:length].repeat_interleave(group, 1)
        value = values[pages].flatten(0, 1)[:length].repeat_interleave(group, 1)
        logits = torch.einsum("thd,nhd->htn", queries[first:last], key) * softmax_scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        places = torch.arange(length, device=q.device)
        at = places[length - (last - first) :, None]
        seen = (places <= at) | (not causal)
        if window_size != (-1, -1):
            assert window_size[1] == 0
            seen = seen & (places >= at - window_size[0])
        logits = logits.masked_fill(~seen, -math.inf)
        if sinks is not None:
            assert sinks.dtype == torch.bfloat16
            sink = sinks.float()[:, None, None].expand(*logits.shape[:2], 1)
            logits = torch.cat((logits, sink), -1)
            value = torch.cat((value, torch.zeros_like(value[:1])))
        probabilities = logits.softmax(-1)
        out[first:last] = torch.einsum("htn,nhd->thd", probabilities, value).to(torch.bfloat16)
    return out


def make_runner(
    world: World, monkeypatch: pytest.MonkeyPatch, fa4: Any = standin
) -> AttentionRunner:
    monkeypatch.setenv("INKLING_KERNELS", "fa4")
    monkeypatch.setattr("inkling_backend.attention.runner.capability_of", lambda device: SM100)
    spec = AttentionSpec(world.num_q_heads, world.layout, torch.bfloat16, quantize_query=True)
    return AttentionRunner(
        spec,
        max_batch=8,
        max_context=world.max_context,
        max_tokens=world.cache.num_pages * 128,
        device=world.device,
        max_q_len=3,
        fa4=fa4,
    )


@pytest.fixture(scope="module")
def world(device: torch.device) -> World:
    torch.manual_seed(3)
    return make_world(LENS, device, k="mxfp8", k_dim=128, page=128)


LAYERS = {
    "plain": LayerAttention(0.1),
    "window": LayerAttention(0.1, window=33),
    "everything": LayerAttention(0.1, window=60, softcap=5.0, sinks=torch.tensor([0.0, 1, -1, 3])),
    "bidirectional": LayerAttention(0.1, causal=False),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("q_len", [None, 1])
def test_fa4_reads_what_was_stored(
    name: str, q_len: int | None, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rows a request in an extend, or one in a decode."""
    runner, layer = make_runner(world, monkeypatch), LAYERS[name]
    if layer.sinks is not None:
        layer = replace(layer, sinks=layer.sinks.to(world.device))
    lens = torch.tensor(LENS, device=world.device)
    counts = torch.tensor([1, 7, 20, 40] if q_len is None else [1, 1, 1, 1])
    indptr = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).to(world.device)
    padding = 2 if q_len is None else 0
    query = world.queries(int(indptr[-1]) + padding, quantized=True)
    plan: Any
    if q_len is None:
        plan = runner.plan_extend(
            *(world.slot_table, world.rows, lens, indptr), *(counts.tolist(), LENS)
        )
    else:
        plan = runner.plan_decode(world.slot_table, world.rows, lens, 4, q_len)
    out = runner.run(plan, query, world.cache, world.empty_out(len(query.data)), layer)
    rows = int(indptr[-1])
    expected = torch.empty(rows, world.num_q_heads, 128, device=world.device)
    real = type(query)(query.data[:rows], query.scale[:rows])
    attend(real, world.cache, world.page_table, lens, indptr, layer=layer, out=expected)
    error = (out[:rows].float() - expected).norm() / expected.norm()
    assert error < 5e-3


def test_several_query_tokens_and_padding(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification: three tokens of each request, and a row of a graph that is padding."""
    runner, layer = make_runner(world, monkeypatch), LAYERS["plain"]
    lens = torch.tensor([0, 130, 257, 40], device=world.device)
    plan = runner.plan_decode(world.slot_table, world.rows, lens, 4, 3)
    query = world.queries(12, quantized=True)
    out = runner.run(plan, query, world.cache, world.empty_out(12), layer)
    expected = torch.empty(12, world.num_q_heads, 128, device=world.device)
    indptr = torch.arange(5, device=world.device) * 3
    attend(query, world.cache, world.page_table, lens, indptr, layer=layer, out=expected)
    error = (out[3:].float() - expected[3:]).norm() / expected[3:].norm()
    assert error < 5e-3
    # Two plans of decode lie in the same buffers: a graph reads them at their addresses.
    again = runner.plan_decode(world.slot_table, world.rows, lens, 4, 3)
    assert again.page_table.data_ptr() == plan.page_table.data_ptr()


def test_what_it_says_of_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(world, monkeypatch)
    assert "fa4" in runner.kernels
    assert runner.workspace_bytes > 0


def test_it_is_refused_without_fa4(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="FA4 comes with SGLang"):
        make_runner(world, monkeypatch, None)


@pytest.mark.parametrize(
    ("changes", "capability", "words"),
    [
        ({}, SM100, ""),
        ({}, None, "no GPU"),
        ({}, (9, 0), "not on 9.0"),
        ({}, (12, 0), "not on 12.0"),
        ({"quantize_query": False}, SM100, "Q is torch.bfloat16"),
        ({"dtype": torch.float16}, SM100, "torch.float16"),
        ({"layout": {"v_format": get_format("nvfp4")}}, SM100, "mxfp8 and nvfp4"),
        ({"layout": {"page_size": 64}}, SM100, "page size 64"),
        ({"layout": {"k_head_dim": 64, "v_head_dim": 64}}, SM100, "64 and 64"),
    ],
)
def test_what_it_cannot_read(
    changes: dict[str, Any], capability: tuple[int, int] | None, words: str
) -> None:
    mxfp8 = get_format("mxfp8")
    layout = replace(CacheLayout(mxfp8, mxfp8, 8, 128, 128, 128), **changes.pop("layout", {}))
    spec = AttentionSpec(32, layout, torch.bfloat16, quantize_query=True)
    found = reasons_against(replace(spec, **changes), capability)
    assert len(found) == bool(words)
    assert words in "".join(found)
