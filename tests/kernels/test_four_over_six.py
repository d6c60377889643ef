"""The choice between blocks scaled to 4 and to 6, where it is close, or there is none."""

from __future__ import annotations

import pytest
import torch

from inkling_backend import reference
from inkling_backend.formats.nvfp4 import NVFP4, NVFP4_FOUR_OVER_SIX
from inkling_backend.kernels.store import store
from tests.kernels.helpers import (
    FOUR_OVER_SIX,
    assert_same_cache,
    clone_cache,
    make_cache,
    make_layout,
)


def blocks_of(manner: str) -> torch.Tensor:
    """float32 ``[blocks, 16]``."""
    x = torch.randn(512, 16)
    if manner == "random":
        return x
    if manner == "equal errors":  # few magnitudes: sums of the same squares in other places
        return torch.randint(-6, 7, (512, 16)) * 0.5 * torch.exp2(torch.randint(-3, 4, (512, 1)))
    if manner == "at 448":  # a maximum of 1792 and more has a scale for 4 that saturates
        x[:, 0] = torch.linspace(1700.0, 3000.0, 512)
        return x * torch.cat([torch.ones(1), torch.full((15,), 300.0)])
    # A maximum below 6 * 2**-10 has no scale for 6, one below 4 * 2**-10 none for 4.
    return x / x.abs().amax(-1, keepdim=True) * torch.linspace(1e-4, 1e-2, 512)[:, None]


@pytest.mark.parametrize("g", [1.0, 0.37, 1e-38, 3e-41])
@pytest.mark.parametrize("manner", ["random", "equal errors", "at 448", "least scale"])
def test_kernel_equals_reference(manner: str, g: float, device: torch.device) -> None:
    scale = torch.tensor([g])
    rows = (blocks_of(manner) * scale).view(64, 1, 128)
    cache = make_cache(make_layout(FOUR_OVER_SIX, "mxfp8", 1, 128), 3, device, k_global=g)
    slots = torch.arange(1, 65)
    want = clone_cache(cache, torch.device("cpu"))
    reference.store(rows, rows, slots, want)
    store(rows.to(device), rows.to(device), slots.to(device), cache)
    assert_same_cache(cache, want)
    if g == 1.0:
        six, best = (fmt.quantize(rows, scale).scale for fmt in (NVFP4, NVFP4_FOUR_OVER_SIX))
        assert six is not None
        assert best is not None
        assert 0 < (six != best).float().mean() < 1, "both are chosen"


def test_of_two_sides_each_follows_its_own_rule(device: torch.device) -> None:
    rows = blocks_of("random").view(64, 1, 128)
    slots = torch.arange(1, 65)
    cache = make_cache(make_layout("nvfp4", FOUR_OVER_SIX, 1, 128), 3, device, v_global=0.37)
    want = clone_cache(cache, torch.device("cpu"))
    reference.store(rows, rows, slots, want)
    store(rows.to(device), rows.to(device), slots.to(device), cache)
    assert_same_cache(cache, want)
    assert not torch.equal(want.k_data, want.v_data)
