"""Every kernel against the oracle, over random models, caches, batches and faults."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.draw import GPU, MIDDLE, SMALL, draw_model
from tests.fuzz.properties import PROPERTIES

EXAMPLES = {"store": 1200, "plan": 1000, "decode": 100, "extend": 100}
# On a GPU, where every model is compiled anew; `integration.gpu.fuzz` draws many cases a model.
GPU_EXAMPLES = 10


@pytest.mark.parametrize("name", PROPERTIES)
def test_kernel(name: str, device: torch.device) -> None:
    interpreted = device.type == "cpu"

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=EXAMPLES[name] if interpreted else GPU_EXAMPLES,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(rng=st.randoms(use_true_random=False))
    def holds(rng: random.Random) -> None:
        torch.manual_seed(rng.randrange(2**31))
        limits = rng.choice((SMALL,) * 4 + (MIDDLE,)) if interpreted else GPU
        PROPERTIES[name](rng, draw_model(rng, limits), limits, device)

    holds()
