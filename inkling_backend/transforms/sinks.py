"""The first tokens of a sequence in higher precision."""

from __future__ import annotations

import torch

# Every query of a causal model looks at these (attention sinks), and what they hold is unlike the
# rest, so their error reaches every output. Their rows are a constant cost of a sequence.
SINK_TOKENS = 4


def keep_sinks(stored: torch.Tensor, exact: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rows ``[T, kv heads, D]`` as attention reads them: ``exact`` in BF16 for sink tokens.

    Args:
        stored: rows read back from the cache.
        exact: the same rows before they were quantized.
        positions: ``[T]`` place of each token in its sequence.
    """
    kept = exact.to(torch.bfloat16).to(stored.dtype)
    return torch.where((positions < SINK_TOKENS)[:, None, None], kept, stored)
