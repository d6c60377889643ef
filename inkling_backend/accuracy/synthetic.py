"""K, V and Q like those of models that are hard to quantize, and what a cache does to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from inkling_backend.accuracy.measure import Row, short
from inkling_backend.accuracy.settings import Setting
from inkling_backend.accuracy.simulate import QKV, CacheSimulation

# What each kind of data has that "plain" (independent normal numbers) has not.
KINDS = {
    "plain": "independent normal numbers",
    "offset": "a constant of 300 to 1000 times the spread in 4 channels of K of every head",
    "heavy": "channels of K and V whose sizes span a factor of 100, with Student's t (3) in them",
    "sinks": "first four keys 8 times as long, along the queries, with values of a hundredth",
}
_OFFSET_CHANNELS = 4
# Mean size of a logit: attention that is neither flat nor on one token.
_SHARPNESS = 2.0


@dataclass(frozen=True)
class Shape:
    """Size of the made data."""

    tokens: int = 512
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128


def make(kind: str, shape: Shape, seed: int) -> QKV:
    """BF16 rows ``[tokens, heads, head_dim]`` of Q, K and V.

    Channels are the same for every seed, tokens are not: two seeds are two texts of one model.
    """
    model = torch.Generator().manual_seed(0)
    text = torch.Generator().manual_seed(seed + 1)
    kv = (shape.tokens, shape.kv_heads, shape.head_dim)
    q = torch.randn(shape.tokens, shape.q_heads, shape.head_dim, generator=text) * _SHARPNESS
    k, v = torch.randn(kv, generator=text), torch.randn(kv, generator=text)
    if kind == "offset":
        size = 300 + 700 * torch.rand(kv[1:], generator=model)
        sign = torch.randn(kv[1:], generator=model).sign()
        order = torch.rand(kv[1:], generator=model).argsort(-1)
        k += torch.where(order < _OFFSET_CHANNELS, size * sign, 0.0)
    elif kind == "heavy":
        for rows in (k, v):
            chi = torch.randn(3, *kv, generator=text).square().mean(0)
            channels = 10 ** (torch.rand(kv[1:], generator=model) * 2 - 1)
            rows *= channels / chi.sqrt().clamp(min=0.05)
        q /= 3
    elif kind == "sinks":
        along = torch.randn(kv[1:], generator=model)
        q += along.repeat_interleave(shape.q_heads // shape.kv_heads, 0) / 2
        k[:4] += 8 * along / along.norm(dim=-1, keepdim=True)
        v[:4] /= 100
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Causal attention in float64: log weights ``[heads, T, T]`` and outputs ``[heads, T, D]``."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    future = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(future, -math.inf)
    weights = logits.log_softmax(-1)
    return weights, weights.exp() @ v


def measure(settings: Sequence[Setting], shape: Shape | None = None) -> Iterator[Row]:
    """A row for each kind of data and setting.

    ``kl`` is the mean divergence of a query's attention weights from those over the BF16 rows,
    ``attention_error`` the error of the outputs over their size (root mean square). Another text
    of the same kind goes first, as the first that a pool stores.
    """
    shape = shape or Shape()
    for kind in KINDS:
        first, rows = make(kind, shape, 0), make(kind, shape, 1)
        weights, output = attention(*rows)
        probability = weights.exp()
        for setting in settings:
            simulation = CacheSimulation(setting)
            simulation.read_back(0, *first)
            seen_weights, seen = attention(*simulation.read_back(0, *rows))
            difference = (weights - seen_weights).masked_fill(probability == 0, 0.0)
            kl = (probability * difference).sum(-1).mean()
            error = (seen - output).norm() / output.norm()
            yield {
                "model": f"synthetic {kind}",
                "setting": setting.name,
                "bits": setting.bits(1),
                "kl": short(float(kl)),
                "attention_error": short(float(error)),
            }
