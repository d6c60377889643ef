"""A cache simulated inside a transformers model's attention.

The model calls `CacheSimulation.attend` with Q, K and V after RoPE. They become what the engine's
attention would see: rows in BF16 as a model gives them, through the transform and the format of the
cache and back, each token's own K and V included.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from inkling_backend.accuracy.errors import AccuracyError
from inkling_backend.accuracy.settings import Setting
from inkling_backend.formats import Format, Query
from inkling_backend.transforms import KeyTransform, PoolCenters

ATTENTION = "inkling_accuracy"
# Keywords by which transformers asks an attention for what SDPA does not do.
_UNKNOWN_TO_SDPA = ("softcap", "s_aux", "sinks")

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class CacheSimulation:
    """The cache of one setting, from an empty pool on.

    Every sequence starts at position 0. `squared_error` and `squared_output` hold, for each layer,
    float64 ``[query heads]`` sums over all tokens since `forget_errors`.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._centers = PoolCenters()
        self.forget_errors()

    def forget_errors(self) -> None:
        """Begin to sum anew; centers stay, as they do for a pool's life."""
        self.squared_error: dict[int, torch.Tensor] = {}
        self.squared_output: dict[int, torch.Tensor] = {}

    def install(self) -> None:
        """Become what models loaded with the attention `ATTENTION` call, in place of another."""
        AttentionInterface.register(ATTENTION, self.attend)
        AttentionMaskInterface.register(ATTENTION, sdpa_mask)

    def read_back(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QKV:
        """What attention reads of ``[T, heads, D]`` BF16 rows: float32 Q, K, V.

        Args:
            layer: whose center to use; its first call sets it.
        """
        recipe, setting = self.setting.recipe_of(layer), self.setting
        center = self._centers.of(layer, k) if setting.centers else None
        transform = KeyTransform(center, setting.rotates)
        keys, queries = transform.key(k), transform.query(q)
        if recipe.quantize_query:
            seen_q = Query.quantize(queries).dequantize()
        else:
            seen_q = queries.to(torch.bfloat16).float()
        seen_k, seen_v = _through(recipe.k, keys), _through(recipe.v, v)
        if recipe.is_quantized:
            for seen, exact in ((seen_k, keys), (seen_v, v)):
                seen[: setting.sink_tokens] = exact[: setting.sink_tokens].to(torch.bfloat16)
        return seen_q, seen_k, seen_v

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """transformers' attention function for one sequence ``[1, heads, T, D]``.

        Raises:
            AccuracyError: several sequences, or attention of a kind that is not simulated.
        """
        asked = [name for name in _UNKNOWN_TO_SDPA if kwargs.get(name) is not None]
        if asked or query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            what = f"with {', '.join(asked)}" if asked else "of a batch or with a cache"
            raise AccuracyError(f"attention {what} is not simulated")
        exact_rows = [x[0].transpose(0, 1).to(torch.bfloat16) for x in (query, key, value)]
        exact = _sdpa(module, exact_rows, query.dtype, attention_mask, kwargs)
        if self.setting.name == "bf16":
            return exact, None
        rows = self.read_back(module.layer_idx, *exact_rows)
        seen = _sdpa(module, rows, query.dtype, attention_mask, kwargs)
        self._note(module.layer_idx, seen[0].double() - exact[0], exact[0].double())
        return seen, None

    def _note(self, layer: int, error: torch.Tensor, output: torch.Tensor) -> None:
        """Add one layer's ``[T, heads, D]``."""
        for sums, values in ((self.squared_error, error), (self.squared_output, output)):
            total = values.square().sum((0, 2)).cpu()
            sums[layer] = sums[layer] + total if layer in sums else total

    def relative_errors(self) -> list[list[float]]:
        """Error of the attention output over its size (root mean square), ``[layer][head]``."""
        return [
            (self.squared_error[layer] / self.squared_output[layer]).sqrt().tolist()
            for layer in sorted(self.squared_error)
        ]


def _through(fmt: Format, rows: torch.Tensor) -> torch.Tensor:
    """Rows in a format and back, as the BF16 tiles that attention multiplies, in float32."""
    return fmt.dequantize(fmt.quantize(rows, None), None).to(torch.bfloat16).float()


def _sdpa(
    module: Any,
    rows: QKV | list[torch.Tensor],
    dtype: torch.dtype,
    mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """``[1, T, heads, Dv]`` of rows ``[T, heads, D]``."""
    q, k, v = (x.transpose(0, 1)[None].to(dtype) for x in rows)
    return sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0]
