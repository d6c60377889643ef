"""Speculative decoding by chains: what is asked for by default, and what is refused.

A draft model proposes a few tokens, one after another, and the model that is served verifies them
in one batch of several query tokens a request. Trees, in which tokens have several successors,
would need masks that the decode kernels do not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# `--speculative-algorithm` of those that have a draft model and draft chains with one candidate.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
# Tokens drafted where nobody says how many: the engine's own choice for most models without trees.
DEFAULT_STEPS = 3

_OUT = "leave --speculative-algorithm out"


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
    if algorithm_of(arguments) not in ALGORITHMS:
        return []  # nothing, or refused by its name
    reasons = []
    prefill, decode = backends
    if prefill != decode:
        reasons.append(
            "speculative decoding with two attention backends is not supported: use "
            "--attention-backend inkling for both phases"
        )
    if getattr(arguments, "enable_dp_attention", False):
        reasons.append(f"speculative decoding with data-parallel attention: {_OUT}")
    if (getattr(arguments, "pp_size", None) or 1) > 1:
        reasons.append(f"speculative decoding over pipeline stages: {_OUT}")
    if getattr(arguments, "enable_hierarchical_cache", False):
        reasons.append(
            f"speculative decoding with HiCache, which would leave the draft's pages behind: {_OUT}"
        )
    one_pool = getattr(arguments, "disable_hybrid_swa_memory", False)
    if getattr(model, "is_hybrid_swa", False) and not one_pool:
        reasons.append(
            "speculative decoding over a pool for layers with a window: "
            "set --disable-hybrid-swa-memory"
        )
    return reasons


def not_drafted_reasons(arguments: Any) -> list[str]:
    """Why an engine that has chosen algorithm and tree by itself cannot be served."""
    algorithm, topk = algorithm_of(arguments), getattr(arguments, "speculative_eagle_topk", None)
    if algorithm is None or (algorithm in ALGORITHMS and (topk or 1) == 1):
        return []
    return [
        f"the engine speculates by {algorithm} with {topk} candidates a token for this model: "
        f"only chains of {', '.join(ALGORITHMS)} are supported, so {_OUT}"
    ]
