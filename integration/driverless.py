"""What features of the engine need of a GPU's driver beside kernels: stand-ins for the CPU engine.

A second plugin, put on the module path of one test's engine. The engine asks for pinned memory when
it has LoRA adapters or a host tier, and pinning needs a driver; here it gets ordinary memory, which
behaves alike without a GPU to copy from. `memory_saver_standin` is on the path as well.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from integration.probe import write_plugin

STANDIN = Path(__file__).resolve().parent / "memory_saver_standin"


def driverless(folder: Path) -> dict[str, str]:
    """Environment variables of an engine with the stand-ins; ``folder`` is for the plugin."""
    write_plugin(folder, "integration-driverless", "integration.driverless:register")
    return {"PYTHONPATH": os.pathsep.join((str(folder), str(STANDIN)))}


def register() -> None:
    """Entry point: from now on nothing in this process is pinned."""
    import torch

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = _as_it_is  # type: ignore[assignment, method-assign]
    # The build of torch is for CUDA, so the engine waits for a GPU that nothing runs on.
    torch.cuda.synchronize = lambda device=None: None


def _as_it_is(tensor: Any, device: object = None) -> Any:
    return tensor


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
