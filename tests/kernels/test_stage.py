"""Copies of K, V and queries against their formats, to the bit."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.formats import Query
from inkling_backend.kernels.stage import dequantize_query, stage
from inkling_backend.reference.gather import gather
from tests.attention.world import World, make_world, slots_of

PAIRS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8", "nvfp4"),
    ("nvfp4", "kvfp4"),
    ("mxfp4", "mxfp4"),
    ("bf16", "bf16"),
]
CAPACITY = 160


def copies(world: World, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    dims = (world.layout.k_head_dim, world.layout.v_head_dim)
    k, v = (
        torch.full((heads, CAPACITY, dim), torch.nan, dtype=torch.bfloat16, device=world.device)
        for dim in dims
    )
    return k, v


def run(
    world: World, rows: list[list[int]], first: int, last: int, head: int = 0, heads: int = 2
) -> tuple[torch.Tensor, ...]:
    k, v = copies(world, heads)
    marks = torch.zeros(len(rows), world.layout.num_kv_heads, dtype=torch.int32)
    marks = marks.to(world.device)
    stage(
        world.cache,
        page_table=world.page_table.clamp(max=world.cache.num_pages - 1),
        rows=torch.tensor(rows, dtype=torch.int32, device=world.device),
        first=first,
        last=last,
        longest=max(length for _, length in rows[first:last]),
        first_head=head,
        k_out=k,
        v_out=v,
        marks=marks,
    )
    return k, v, marks


def exact(world: World, request: int, side: str) -> torch.Tensor:
    """``[heads, tokens, D]`` without the global scale, in float32."""
    x = gather(slots_of(world, request), world.cache, side, torch.float32)
    scale = world.cache.k_global if side == "k" else world.cache.v_global
    return (x if scale is None else x / scale).transpose(0, 1)


@pytest.mark.parametrize("page", [32, 64])
@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_copies_are_exact(k: str, v: str, page: int, device: torch.device) -> None:
    world = make_world([70, 33, 20], device, k=k, v=v, k_dim=96, v_dim=64, page=page)
    rows = [[0, 99], [5, 33], [50, 20]]
    k_out, v_out, marks = run(world, rows, 1, 3)
    for side, out in (("k", k_out), ("v", v_out)):
        written = torch.zeros(CAPACITY, dtype=torch.bool)
        for request in (1, 2):
            start, length = rows[request]
            written[start : start + length] = True
            got = out[:, start : start + length].float()
            # float32 division by the global scale leaves an error that bfloat16 does not show.
            assert torch.equal(got, exact(world, request, side).bfloat16().float())
            torch.testing.assert_close(got, exact(world, request, side), rtol=1e-6, atol=0)
        assert out[:, ~written.to(device)].isnan().all(), "nothing else may be written"
    assert not marks.any()
    later = run(world, rows, 1, 3, head=1, heads=1)
    for some, whole in zip(later[:2], (k_out, v_out), strict=True):
        assert torch.equal(some.nan_to_num(7.0), whole[1:].nan_to_num(7.0))


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, -3e38])
def test_what_is_not_finite_in_v_is_zero_and_marked(bad: float, device: torch.device) -> None:
    world = make_world([70, 40], device)
    slot = int(slots_of(world, 1)[35])
    world.cache.v_data[slot, 1, 3] = bad
    world.cache.k_data[slot, 0, 3] = bad
    k_out, v_out, marks = run(world, [[0, 70], [70, 40]], 0, 2)
    assert marks.tolist() == [[0, 0], [0, 1]]
    assert v_out[1, 105, 3] == 0
    assert v_out[:, :110].isfinite().all()
    expected = torch.tensor(bad).bfloat16().item()
    assert k_out[0, 105, 3].item() == pytest.approx(expected, nan_ok=True), "K is copied as it is"
    assert run(world, [[0, 70], [70, 40]], 0, 2, head=1, heads=1)[2].tolist() == [[0, 0], [0, 1]]


@pytest.mark.parametrize("dim", [64, 96])
def test_queries_are_exact(dim: int, device: torch.device) -> None:
    q = torch.randn(37, 3, dim) * torch.exp2(torch.randint(-20, 20, (37, 3, 1)))
    query = Query.quantize(q.to(device))
    out = torch.empty(35, 3, dim, dtype=torch.bfloat16, device=device)
    dequantize_query(query, out)
    assert torch.equal(out.float(), query.dequantize()[:35])
