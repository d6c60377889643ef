"""Speculative decoding: what is asked for by default, what is refused, and masks of trees.

A draft model proposes a few tokens, one after another, and the model that is served verifies them
in one batch of several query tokens a request. With n-grams there is no draft model, and what is
proposed is a tree: a continuation that was seen before, and fillers beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from inkling_backend import env
from inkling_backend.engines.sglang import versions

# `--speculative-algorithm` of those that have a draft model and draft chains with one candidate.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# The one whose drafts come from what was said before, in trees.
NGRAM = "NGRAM"
KNOWN = (*ALGORITHMS, NGRAM)
# Tokens drafted where nobody says how many: the engine's own choice for most models without trees.
DEFAULT_STEPS = 3

NO_DRAFT = "leave --speculative-algorithm out"


def algorithm_of(arguments: Any) -> str | None:
    """The algorithm's name in capitals, None without speculation."""
    name = getattr(arguments, "speculative_algorithm", None)
    return str(name).upper() if name else None


def verified_tokens(arguments: Any) -> int:
    """Tokens of a request that are verified at once; 1 without speculation."""
    if algorithm_of(arguments) is None:
        return 1
    return getattr(arguments, "speculative_num_draft_tokens", None) or 1


def chain_defaults(arguments: Any) -> Mapping[str, int]:
    """Fields to set so that the engine does not choose a tree where nobody asked for one."""
    topk = getattr(arguments, "speculative_eagle_topk", None)
    if algorithm_of(arguments) not in ALGORITHMS or topk not in (None, 1):
        return {}
    steps, tokens = (
        getattr(arguments, f"speculative_num_{name}", None) for name in ("steps", "draft_tokens")
    )
    if steps is None:
        steps = DEFAULT_STEPS if tokens is None else max(1, tokens - 1)
    return {
        "speculative_eagle_topk": 1,
        "speculative_num_steps": steps,
        "speculative_num_draft_tokens": steps + 1,
    }


def speculation_reasons(
    arguments: Any, backends: tuple[str | None, str | None], model: Any
) -> list[str]:
    """Why drafts cannot be used together with what else is asked for (empty if they can).

    Args:
        arguments: the engine's arguments as resolved so far.
        backends: names of the prefill and of the decode attention backend.
        model: the engine's model configuration.
    """
    algorithm = algorithm_of(arguments)
    if algorithm not in KNOWN:
        return []  # nothing, or refused by its name
    reasons = []
    breadth = getattr(arguments, "speculative_ngram_max_bfs_breadth", 1)
    if algorithm == NGRAM and breadth > 1:
        reasons.append(
            f"--speculative-ngram-max-bfs-breadth {breadth}: the engine has broader trees over "
            "pages for FlashInfer alone: set it to 1"
        )
    if algorithm == NGRAM and env.asks_for_fa4():
        reasons.append("INKLING_KERNELS=fa4 has no mask for the trees of n-grams: unset it")
    prefill, decode = backends
    if prefill != decode:
        reasons.append(
            "speculative decoding with two attention backends is not supported: use "
            "--attention-backend inkling for both phases"
        )
    if getattr(arguments, "enable_dp_attention", False):
        reasons.append(f"speculative decoding with data-parallel attention: {NO_DRAFT}")
    if (getattr(arguments, "pp_size", None) or 1) > 1:
        reasons.append(f"speculative decoding over pipeline stages: {NO_DRAFT}")
    if getattr(arguments, "enable_hierarchical_cache", False):
        reasons.append(
            "speculative decoding with HiCache, which would leave the draft's pages behind: "
            f"{NO_DRAFT}"
        )
    if versions.windows_have_a_pool(arguments, model):
        reasons.append(
            "speculative decoding over a pool for layers with a window: "
            "set --disable-hybrid-swa-memory"
        )
    return reasons


def not_drafted_reasons(arguments: Any) -> list[str]:
    """Why an engine that has chosen algorithm and tree by itself cannot be served."""
    algorithm, topk = algorithm_of(arguments), getattr(arguments, "speculative_eagle_topk", None)
    if algorithm is None or (algorithm in KNOWN and (topk or 1) == 1):
        return []
    return [
        f"the engine speculates by {algorithm} with {topk} candidates a token for this model: "
        f"only one of {', '.join(KNOWN)} is supported, so {NO_DRAFT}"
    ]


def tree_words(
    mask: torch.Tensor, seq_lens: torch.Tensor, tokens: int, *, whole: bool
) -> torch.Tensor:
    """The engine's mask of drafted trees in the words of `AttentionRunner.plan_decode`.

    Args:
        mask: bool, request after request ``[tokens, old tokens + tokens]`` row by row, or without
            the old tokens. Requests that it does not hold get any words.
        seq_lens: ``[B]`` old tokens of each request.
        tokens: new tokens of each request, at most 64.
        whole: whether the mask holds the old tokens, too.

    Returns:
        ``[B, tokens]`` int64.
    """
    old = seq_lens.long() if whole else torch.zeros_like(seq_lens, dtype=torch.int64)
    width = old + tokens
    first = torch.cumsum(width * tokens, 0) - width * tokens
    each = torch.arange(tokens, device=mask.device)
    row = first[:, None] + each * width[:, None] + old[:, None]  # [B, tokens]
    place = (row[..., None] + each).clamp(max=mask.numel() - 1)
    return (mask[place].long() << each).sum(-1)
