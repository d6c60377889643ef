"""Every INKLING_* environment variable, read and checked in one place."""

from __future__ import annotations

import os
from typing import Literal

from inkling_backend.errors import EnvironmentVariableError

Implementation = Literal["triton", "reference"]

Extend = Literal["auto", "triton", "flashinfer"]

_KERNELS = ("auto", "triton", "reference", "fa4")
EXTENDS: tuple[Extend, ...] = ("auto", "triton", "flashinfer")


def kernels() -> str:
    """``INKLING_KERNELS``: what runs, ``auto``, ``triton``, ``reference`` or ``fa4``.

    ``auto`` takes Triton on CUDA tensors and the plain-torch reference elsewhere. ``triton`` on
    CPU tensors needs ``TRITON_INTERPRET=1``; it exists to run the real kernels in tests. ``fa4``
    is Triton but for attention, and refuses to start where FA4 cannot attend.
    """
    value = os.environ.get("INKLING_KERNELS", "auto")
    if value not in _KERNELS:
        raise EnvironmentVariableError("INKLING_KERNELS", value, _KERNELS)
    return value


def implementation(device_type: str) -> Implementation:
    """What runs on tensors of this kind of device (``torch.device.type``), by `kernels`."""
    wanted = kernels()
    if wanted == "reference" or (wanted == "auto" and device_type != "cuda"):
        return "reference"
    return "triton"


def asks_for_fa4() -> bool:
    """Whether `kernels` is ``fa4``; a value that it refuses is not."""
    return os.environ.get("INKLING_KERNELS") == "fa4"


def extend() -> Extend:
    """``INKLING_EXTEND``: what attends in prefill, ``auto``, ``triton`` or ``flashinfer``.

    ``auto`` takes FlashInfer where it can serve the model, Triton elsewhere. ``flashinfer`` refuses
    to start where it cannot. Layers that FlashInfer does not serve take Triton in either case.
    """
    value = os.environ.get("INKLING_EXTEND", "auto")
    for known in EXTENDS:
        if value == known:
            return known
    raise EnvironmentVariableError("INKLING_EXTEND", value, EXTENDS)
