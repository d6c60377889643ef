"""Every kernel against the oracle, over random models, caches, batches and faults."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fuzz.draw import GPU, INTERPRETER, draw_model
from tests.fuzz.properties import PROPERTIES

EXAMPLES = {"store": 60, "plan": 30, "decode": 40, "extend": 40}


@pytest.mark.parametrize("name", PROPERTIES)
def test_kernel(name: str, device: torch.device) -> None:
    limits = GPU if device.type == "cuda" else INTERPRETER

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=EXAMPLES[name],
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )
    @given(rng=st.randoms(use_true_random=False))
    def holds(rng: random.Random) -> None:
        torch.manual_seed(rng.randrange(2**31))
        PROPERTIES[name](rng, draw_model(rng, limits), limits, device)

    holds()
