"""When the centers of keys are fixed: once, by the first prefill that has the pool for itself.

A page is valid under the center that its keys were stored with alone. So a center changes only
while no page but those of the very batch that it comes from is in use, by a request or by the
prefix cache, and only once: from then on a request has the same bits whenever it comes. Until then
centers are zero, which is exact, too, and only less precise.

Batches that hold no tokens of requests (warm-up, capture of graphs) have no pages, and fix nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from inkling_backend.engines.sglang import versions
from inkling_backend.formats.layout import LayerCache
from inkling_backend.transforms import center_of

logger = logging.getLogger(__name__)

# The mean of N keys misses that of all by their spread over sqrt(N). KL of SmolLM2 against a BF16
# cache, keys rotated, 1024 tokens of text after those that made the centers:
#   tokens     none      8     64    512   1024
#   mxfp8     .0062  .0064  .0055  .0052  .0048
#   nvfp4     .0716      -  .0669  .0623      -
# Fewer than 64 gain nothing; waiting for many more may mean waiting for ever.
MIN_TOKENS = 64
# No more are looked at: their float32 copy is temporary memory.
MOST_TOKENS = 1024


class Pool(Protocol):
    """What is asked of `InklingKVPool`."""

    page_size: int
    centers_are_open: bool


class Allocator(Protocol):
    """What is asked of the engine's allocator of pages."""

    size: int

    def available_size(self) -> int: ...


class Centers:
    """Fixes the centers of one pool. Every batch says `begin`, every layer that stores `see`."""

    def __init__(self, pool: Pool, allocator: Allocator) -> None:
        self._pool = pool
        self._allocator = allocator
        self._tokens = 0
        self._seen: set[int] = set()

    def begin(self, new: Sequence[int] = (), total: Sequence[int] = ()) -> None:
        """A batch is planned: decide whether its keys become the centers.

        Args:
            new, total: of each request of a prefill its new tokens and all its tokens; empty for
                every other batch.
        """
        self._tokens = 0
        if not self._pool.centers_are_open:
            return
        tokens, page = sum(new), self._pool.page_size
        own = sum(-(-n // page) for n in new)
        used = self._allocator.size // page - self._allocator.available_size() // page
        if tokens >= MIN_TOKENS and list(new) == list(total) and used == own:
            self._pool.centers_are_open = False
            self._tokens = min(tokens, MOST_TOKENS)
            self._seen.clear()
            if versions.is_first_rank():
                logger.info("inkling: centers of K are fixed from now on, by %d tokens", tokens)

    def see(self, layer: int, cache: LayerCache, k: torch.Tensor) -> None:
        """A layer is about to store keys ``[T, kv heads, Dk]`` of the batch, padding at the end."""
        if self._tokens and layer not in self._seen and cache.k_center is not None:
            self._seen.add(layer)
            cache.k_center.copy_(center_of(k[: self._tokens]))
