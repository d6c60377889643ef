"""What this machine has, and what is missing for serving."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch

from inkling_backend.engines.sglang.versions import version_reason
from inkling_backend.errors import InklingError
from inkling_backend.formats import RECIPES
from inkling_backend.kernels.arch import MIN_CAPABILITY, loads_tiles, supports

ENTRY_POINTS = "sglang.srt.plugins"
PLUGIN = "inkling"


class Check(NamedTuple):
    """One finding.

    needed: whether serving depends on it.
    """

    name: str
    ok: bool
    needed: bool
    found: str
    next_step: str = ""


def examine() -> list[Check]:
    """Every check, in the order in which one would mend them."""
    return [*_libraries(), *_gpu(), *_engine(), *_environment(), _kernels()]


def would_serve(checks: list[Check]) -> bool:
    """Whether everything that is needed is there."""
    return all(check.ok for check in checks if check.needed)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _libraries() -> Iterator[Check]:
    yield Check("inkling-backend", True, True, _version("inkling-backend") or "from source")
    yield Check("torch", True, True, torch.__version__)
    triton = _version("triton")
    yield Check(
        "triton",
        triton is not None,
        True,
        triton or "not installed",
        "" if triton else "pip install triton",
    )


def _gpu() -> Iterator[Check]:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        found = "none" if built else "none; this torch is built without CUDA"
        step = "run on a machine with an NVIDIA GPU" if built else "install a CUDA build of torch"
        yield Check("GPU", False, True, found, step)
        return
    capability = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}"
    ok = supports(capability)
    least = ".".join(map(str, MIN_CAPABILITY))
    yield Check("GPU", ok, True, name, "" if ok else f"{least} (Ampere) or newer is needed")


def _engine() -> Iterator[Check]:
    version = _version("sglang")
    if version is None:
        step = "pip install 'inkling-backend[sglang]'"
        yield Check("SGLang", False, True, "not installed", step)
        return
    reason = version_reason(version)
    yield Check("SGLang", reason is None, True, version, reason or "")
    points = metadata.entry_points(group=ENTRY_POINTS)
    seen = any(point.name == PLUGIN for point in points)
    step = "" if seen else "install this package with pip into the engine's environment"
    yield Check("plugin visible to the engine", seen, True, "yes" if seen else "no", step)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN not in {name.strip() for name in allowed.split(",")}:
        step = f"unset SGLANG_PLUGINS, or add {PLUGIN} to it"
        yield Check("plugin allowed", False, True, f"SGLANG_PLUGINS={allowed}", step)
    flashinfer = _version("flashinfer-python")
    yield Check("FlashInfer", flashinfer is not None, False, flashinfer or "not installed")


def _environment() -> Iterator[Check]:
    from inkling_backend import env

    for name, read in (("INKLING_KERNELS", env.kernels), ("INKLING_EXTEND", env.extend)):
        try:
            yield Check(name, True, True, read())
        except InklingError as error:
            yield Check(name, False, True, str(error), "unset it")


def _kernels() -> Check:
    recipes = ", ".join(RECIPES)
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return Check("kernels", True, False, f"plain torch (reference) for {recipes}")
    fast = loads_tiles(torch.cuda.get_device_capability())
    decode = "decode_fast" if fast else "decode"
    return Check("kernels", True, False, f"store, {decode}, extend for {recipes}")
