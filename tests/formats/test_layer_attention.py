"""What a layer may ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats.layer_attention import LayerAttention


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *(("sm_scale", {"sm_scale": value}) for value in (0.0, -1.0, float("nan"), float("inf"))),
        *(("softcap", {"softcap": value}) for value in (0.0, -30.0, float("nan"), float("inf"))),
        ("window", {"window": -1}),
        ("window", {"window": 5, "causal": False}),
    ],
)
def test_values_out_of_range(name: str, values: dict[str, Any]) -> None:
    with pytest.raises(InvalidTensorError, match=f"^{name}:"):
        LayerAttention(**{"sm_scale": 1.0} | values)


@pytest.mark.parametrize(
    "sinks",
    [
        torch.zeros(3),
        torch.zeros(4, 1),
        torch.zeros(8)[::2],
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(4, dtype=torch.float64),
    ],
)
def test_sinks_of_another_model(sinks: torch.Tensor) -> None:
    with pytest.raises(InvalidTensorError, match=r"^sinks:"):
        LayerAttention(1.0, sinks=sinks).check_sinks(4)


def test_one_sink_for_each_query_head() -> None:
    LayerAttention(1.0).check_sinks(4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        LayerAttention(1.0, sinks=torch.zeros(4, dtype=dtype)).check_sinks(4)
