"""The exact transform of K, and what it asks of Q."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_backend.transforms.hadamard import rotate


@dataclass(frozen=True)
class KeyTransform:
    """Center, then rotate. Attention over the results is attention over what was given.

    Attributes:
        center: float32 ``[kv heads, D]`` taken from every key, or None.
        rotates: whether K and Q are multiplied by the Hadamard matrix.
    """

    center: torch.Tensor | None = None
    rotates: bool = False

    def key(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys ``[T, kv heads, D]`` as the cache stores them, float32."""
        rows = keys.float()
        if self.center is not None:
            rows = rows - self.center
        return rotate(rows) if self.rotates else rows

    def query(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries ``[T, query heads, D]`` that go with such keys, float32."""
        return rotate(queries) if self.rotates else queries.float()
