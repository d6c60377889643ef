"""Data like those of hard models: what it has, and what the transforms do about it."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.accuracy.settings import BASES, parse
from inkling_backend.accuracy.synthetic import KINDS, Shape, attention, make, measure

SHAPE = Shape(tokens=128, q_heads=4, kv_heads=2, head_dim=64)


def test_offsets_are_hundreds_of_times_the_spread() -> None:
    _, k, _ = make("offset", SHAPE, 0)
    mean = k.float().mean(0).abs()
    large = mean > 250
    assert large.sum(-1).tolist() == [4, 4]
    assert mean[large].max() <= 1001
    assert torch.equal(large, make("offset", SHAPE, 7)[1].float().mean(0).abs() > 250)


@pytest.mark.parametrize("kind", KINDS)
def test_two_seeds_are_two_texts(kind: str) -> None:
    one, same, other = (make(kind, SHAPE, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[1], other[1])


def test_sinks_draw_attention() -> None:
    share = {}
    for kind in ("plain", "sinks"):
        weights, _ = attention(*make(kind, SHAPE, 0))
        share[kind] = float(weights.exp()[:, 64:, :4].sum(-1).mean())
    assert share["sinks"] > 3 * share["plain"]


def test_centered_recipes_do_not_feel_an_offset() -> None:
    names = [f"{base}+center{more}" for base in BASES for more in ("", "+rotate")]
    errors = {
        (row["setting"], row["model"]): row["attention_error"]
        for row in measure([parse(name) for name in (*names, "nvfp4")], SHAPE)
    }
    for name in names:
        plain, offset = (errors[name, f"synthetic {kind}"] for kind in ("plain", "offset"))
        assert offset < 1.5 * plain
    assert errors["nvfp4", "synthetic offset"] > 3 * errors["nvfp4", "synthetic plain"]


def test_attention_equals_torchs() -> None:
    q, k, v = make("plain", SHAPE, 0)
    _, output = attention(q, k, v)
    heads = [x.double().transpose(0, 1)[None] for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(output, expected[0])
