"""Attention of a model whose layers are cached in several layouts: a runner for each layout.

Layers take turns, so the runners share what no layout changes: page tables and plans of extend,
and plans of decode where the split rules are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from inkling_backend.attention.plans import DecodePlan, ExtendPlan
from inkling_backend.attention.runner import AttentionRunner
from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.formats import Query
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import CacheLayout, LayerCache


class MixedRunner(AttentionRunner):
    """An `AttentionRunner` whose ``run`` takes layers of any of its layouts.

    ``spec`` is that of most layers.
    """

    def __init__(self, spec: AttentionSpec, layouts: Iterable[CacheLayout], **options: Any) -> None:
        """
        Args:
            layouts: of the layers; they differ from ``spec.layout`` in formats or KV heads alone.
            options: as of `AttentionRunner`.

        Raises:
            UnsupportedError: with every reason, if a layout cannot be had on the device.
        """
        super().__init__(spec, **options)
        self._others = {
            layout: AttentionRunner(replace(spec, layout=layout), like=self, **options)
            for layout in dict.fromkeys(layouts)
            if layout != spec.layout
        }

    @property
    def kernels(self) -> str:
        """What runs the attention of any layer, for logs."""
        return "; ".join(dict.fromkeys([super().kernels, *(r.kernels for r in self._runners)]))

    @property
    def workspace_bytes(self) -> int:
        """Device bytes held by all runners, beside the pool."""
        return super().workspace_bytes + sum(runner.workspace_bytes for runner in self._runners)

    @property
    def _runners(self) -> Iterable[AttentionRunner]:
        return self._others.values()

    def plan_decode(self, *args: Any, **kwargs: Any) -> DecodePlan:
        """As of `AttentionRunner`, for every layout."""
        plan = super().plan_decode(*args, **kwargs)
        if not self._others:
            return plan
        others = {
            layout: runner.plan_decode(*args, **kwargs)
            for layout, runner in self._others.items()
            if not runner.plans_as(self)
        }
        return replace(plan, others=others)

    def run(
        self,
        plan: DecodePlan | ExtendPlan,
        query: Query,
        cache: LayerCache,
        out: torch.Tensor,
        layer: LayerAttention,
    ) -> torch.Tensor:
        """As of `AttentionRunner`; ``cache`` says the layout."""
        runner = self._others.get(cache.layout) if self._others else None
        if runner is None:
            return super().run(plan, query, cache, out, layer)
        if isinstance(plan, DecodePlan):
            plan = (plan.others or {}).get(cache.layout, plan)
        return runner.run(plan, query, cache, out, layer)
