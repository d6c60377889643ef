"""Kernels run on the GPU where there is one, and under Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import random
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.quick_interpreter import quicken

# Triton decides when a kernel is defined, so this must come before the first import of Triton.
if not torch.cuda.is_available():
    assert "triton" not in sys.modules
    os.environ["TRITON_INTERPRET"] = "1"
    quicken()

settings.register_profile(
    "inkling", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("inkling")


def pytest_configure(config: pytest.Config) -> None:
    """Quiet what kernels do on purpose: infinities and NaN are silent on a GPU."""
    config.addinivalue_line(
        "filterwarnings", "ignore:.* encountered in:RuntimeWarning:triton.runtime.interpreter"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest comes first, so that processes end at about the same time."""
    items.sort(key=lambda item: "fuzz" not in item.path.parts)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where kernels run: the GPU, or the CPU through the interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)
