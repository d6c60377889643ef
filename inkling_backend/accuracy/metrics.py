"""How far a model with one cache is from the same model with another."""

from __future__ import annotations

import math

import torch
from torch.nn.functional import log_softmax

# Rows of logits turned into float64 at once: 100 MB for a vocabulary of 100 thousand.
_ROWS = 128


class Distance:
    """Sums over positions, in float64."""

    def __init__(self) -> None:
        self._kl = self._loss = 0.0
        self._same = self._positions = self._targets = 0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Count one sequence.

        Args:
            reference, logits: ``[T, vocabulary]`` of the two models.
            ids: ``[T]`` the tokens; the logits of t predict the token t + 1.
        """
        last = ids.shape[0] - 1
        for begin in range(0, ids.shape[0], _ROWS):
            rows = slice(begin, begin + _ROWS)
            p = log_softmax(reference[rows].double(), -1)
            q = log_softmax(logits[rows].double(), -1)
            self._kl += float((p.exp() * (p - q)).sum())
            self._same += int((p.argmax(-1) == q.argmax(-1)).sum())
            targets = ids[begin + 1 : begin + _ROWS + 1, None]
            self._loss -= float(q[: targets.shape[0]].gather(-1, targets).sum())
        self._positions += ids.shape[0]
        self._targets += last

    @property
    def kl(self) -> float:
        """Mean divergence of the next token's distribution from the reference's, in nats."""
        return self._kl / self._positions

    @property
    def perplexity(self) -> float:
        """Of the text."""
        return math.exp(self._loss / self._targets)

    @property
    def top1(self) -> float:
        """Share of positions where both models would say the same token."""
        return self._same / self._positions
