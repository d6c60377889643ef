"""Decode of new tokens that are a tree: each sees what its word says, whatever its place."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.kernels.configs import CHUNK_TOKENS
from tests.attention.world import assert_as_accurate, make_world, slots_of
from tests.kernels.test_decode import kernel, run_decode  # noqa: F401

# Parents of six tokens: two chains and a leaf of the root, told in turns.
PARENTS = (-1, 0, 0, 1, 2, 0)
CHAIN = (-1, 0, 1, 2, 3, 4)
Q_LEN = len(PARENTS)


def words(*parents: tuple[int, ...]) -> torch.Tensor:
    """``[requests, tokens]``: a token sees itself and what its parent sees."""
    rows = []
    for each in parents:
        row: list[int] = []
        for token, parent in enumerate(each):
            row.append((row[parent] if parent >= 0 else 0) | 1 << token)
        rows.append([word - (1 << 64) if word >> 63 else word for word in row])
    return torch.tensor(rows)


@pytest.mark.parametrize("k", ["mxfp8", "nvfp4", "bf16"])
def test_a_token_sees_its_branch(k: str, device: torch.device) -> None:
    # A border of tiles, splits and pages lies within the tree of each but the first.
    lens = [6, 66, 131, 258, 514]
    world = make_world(lens, device, k=k, v=k, kv_heads=1, group=2, max_context=1024)
    query = world.queries(len(lens) * Q_LEN)
    tree = words(*[PARENTS] * len(lens)).to(device)
    out = run_decode(world, query, q_len=Q_LEN, tree=tree)
    q = query.dequantize()
    for b in range(len(lens)):
        rows = slice(b * Q_LEN, (b + 1) * Q_LEN)
        assert_as_accurate(out[rows], world, b, q[rows], tree=tree[b])
    with pytest.raises(AssertionError, match="error"):
        assert_as_accurate(out[:Q_LEN], world, 0, q[:Q_LEN])


def test_a_chain_told_as_a_tree_has_the_same_bits(device: torch.device) -> None:
    world = make_world([40, 258], device, k="mxfp8", kv_heads=1, k_dim=128)
    query = world.queries(2 * Q_LEN)
    told = run_decode(world, query, q_len=Q_LEN, tree=words(CHAIN, CHAIN).to(device))
    assert torch.equal(told, run_decode(world, query, q_len=Q_LEN))


def test_every_request_has_its_own_tree(device: torch.device) -> None:
    world = make_world([70, 70], device, group=1, kv_heads=1)
    query = world.queries(2 * Q_LEN)
    trees = words(PARENTS, CHAIN).to(device)
    out = run_decode(world, query, q_len=Q_LEN, tree=trees)
    for b, tree in enumerate(trees):
        alone = run_decode(world, query, order=[b], q_len=Q_LEN, tree=tree[None])
        assert torch.equal(alone, out[b * Q_LEN : (b + 1) * Q_LEN])


def test_64_tokens(device: torch.device) -> None:
    """The sign is a bit like the others: the last token is seen by itself alone."""
    world = make_world([100], device, group=1, kv_heads=1)
    query = world.queries(64)
    tree = words((-1, *[0] * 63)).to(device)
    out = run_decode(world, query, q_len=64, tree=tree)
    assert_as_accurate(out, world, 0, query.dequantize(), tree=tree[0])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_no_other_branch(bad: float, device: torch.device) -> None:
    world = make_world([CHUNK_TOKENS + 3], device, group=1, kv_heads=1)
    query = world.queries(Q_LEN)
    tree = words(PARENTS).to(device)
    clean = run_decode(world, query, q_len=Q_LEN, tree=tree)
    world.cache.v_data[slots_of(world, 0)[-Q_LEN + 1], 0, 5] = bad  # of token 1, which 3 sees, too
    out = run_decode(world, query, q_len=Q_LEN, tree=tree)
    assert out[[1, 3], :, 5].isnan().all()
    for token in (0, 2, 4, 5):
        assert torch.equal(out[token], clean[token])
