"""Divergence, perplexity and agreement."""

from __future__ import annotations

import math

import pytest
import torch

from inkling_backend.accuracy.metrics import Distance


def test_sums_equal_the_definitions() -> None:
    reference, logits = torch.randn(2, 300, 11), torch.randn(2, 300, 11)
    ids = torch.randint(11, (2, 300))
    distance = Distance()
    for i in range(2):
        distance.add(reference[i], logits[i], ids[i])
    p, q = reference.double().softmax(-1), logits.double().softmax(-1)
    assert distance.kl == pytest.approx(float((p * (p / q).log()).sum(-1).mean()))
    losses = [-q[i, t, ids[i, t + 1]].log().item() for i in range(2) for t in range(299)]
    assert distance.perplexity == pytest.approx(math.exp(sum(losses) / len(losses)))
    same = (reference.argmax(-1) == logits.argmax(-1)).double().mean()
    assert distance.top1 == pytest.approx(float(same))


def test_the_same_model_is_at_no_distance() -> None:
    logits, distance = torch.randn(130, 7), Distance()
    distance.add(logits, logits + 3, torch.randint(7, (130,)))
    assert distance.kl == pytest.approx(0, abs=1e-6)
    assert distance.top1 == 1
