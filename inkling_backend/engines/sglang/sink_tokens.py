"""What speaks against rows in BF16 for the first tokens of requests (``--inkling-sink-tokens``).

A row goes with a page and a place in it. A request's first page holds its first tokens from its
beginning on, also where it comes from the prefix cache, because the engine shares whole pages.
"""

from __future__ import annotations

from typing import Any

from inkling_backend.engines.sglang import speculation
from inkling_backend.engines.sglang.flags import KV_CACHE_DTYPES, Flags

_WHAT = "--inkling-sink-tokens"


def sink_token_reasons(arguments: Any, flags: Flags) -> list[str]:
    """Why this server cannot keep the first tokens of requests in BF16 (empty if it can).

    Args:
        arguments: the engine's arguments.
        flags: the backend's own options.
    """
    if not flags.inkling_sink_tokens:
        return []
    reasons = []
    if KV_CACHE_DTYPES.get(arguments.kv_cache_dtype) == "bf16":
        reasons.append(
            f"{_WHAT} with --kv-cache-dtype bf16, which keeps every token in BF16: leave one of "
            "them out"
        )
    if speculation.algorithm_of(arguments) == speculation.NGRAM:
        reasons.append(
            f"{_WHAT} with drafts of n-grams, which are stored at one place and moved to another: "
            f"leave it out, or {speculation.NO_DRAFT}"
        )
    return reasons
