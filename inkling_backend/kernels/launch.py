"""Programmatic dependent launch: a kernel is placed on the GPU while the one before it still runs.

It hides most of what a launch costs, which counts where a kernel takes microseconds. Source: CUDA
C++ programming guide, programmatic dependent launch and synchronization; PTX ``griddepcontrol``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from inkling_backend.kernels.arch import capability_of, places_early

# Requests of a batch up to which it pays.
_MOST_REQUESTS = 8


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """First statement of a kernel: lets the next one be placed, waits for all those before.

    Each kernel of a chain waits, so none reads or writes what an earlier one still uses.
    """
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


def places_next(device: torch.device, requests: int) -> bool:
    """The constexpr ``EARLY`` of a kernel whose successor is launched `early`.

    Args:
        requests: of the batch.
    """
    capability = capability_of(device)
    return requests <= _MOST_REQUESTS and capability is not None and places_early(capability)


def early(device: torch.device, requests: int) -> dict[str, Any]:
    """``EARLY`` and the launch option of a kernel that is placed before its predecessor ends.

    Not for a persistent grid: where others still run, its programs would not be spread evenly.
    """
    if not places_next(device, requests):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
