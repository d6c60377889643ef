"""What this machine has, and what is missing for serving."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import NamedTuple

import torch

from inkling_backend import env
from inkling_backend.attention import AttentionSpec
from inkling_backend.bench.results import gpu
from inkling_backend.engines.sglang.versions import version_reason
from inkling_backend.engines.sglang.visible import PLUGIN, REMEDY, is_visible
from inkling_backend.errors import InklingError
from inkling_backend.formats import RECIPES, get_recipe
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.kernels.arch import (
    ASYNC_TILES_CAPABILITY,
    MIN_CAPABILITY,
    Capability,
    loads_tiles,
    supports,
)

_CHECK = "inkling_backend.engines.sglang.check"
_SECONDS = 300
# Without these the engine need not be asked.
_BEFORE_OFFER = ("SGLang", "plugin visible", "plugin allowed")
_INSTALL = "pip install 'inkling-backend[sglang]'"


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
    checks = [*_libraries(), *_gpu(), *_kernels(), *_environment(), *_engine()]
    if all(check.ok for check in checks if check.name in _BEFORE_OFFER):
        checks.append(_offer())
    return [*checks, _flashinfer()]


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
    built = "ROCm" if torch.version.hip else f"CUDA {torch.version.cuda or 'none'}"
    yield Check("torch", True, True, f"{torch.__version__}, {built}")
    triton = _version("triton")
    step = "" if triton else "pip install triton"
    yield Check("triton", triton is not None, True, triton or "not installed", step)
    # Triton builds the launcher of every kernel with it.
    names = (os.environ.get("CC"), "gcc", "clang")
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    step = "" if compiler else "install gcc or clang, or set CC: Triton needs one"
    yield Check("C compiler", compiler is not None, True, compiler or "none found", step)


def _driver() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    try:
        return gpu()["driver"]
    except (OSError, subprocess.CalledProcessError, IndexError, ValueError):
        return None


def _gpu() -> Iterator[Check]:
    driver = _driver()
    if not torch.cuda.is_available() or torch.version.hip:
        if torch.version.hip:
            found, step = "AMD", "AMD GPUs are not supported: use one of NVIDIA"
        elif not torch.version.cuda:
            found, step = "none seen: this torch has no CUDA", "install a CUDA build of torch"
        elif driver:
            found = f"none seen by torch, but driver {driver}"
            step = (
                f"update the driver, or install a torch for a CUDA older than {torch.version.cuda}"
            )
        else:
            found, step = "none", "run on a machine with an NVIDIA GPU and its driver"
        yield Check("GPU", False, True, found, step)
        return
    capability = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {_dotted(capability)}"
    if driver:
        name += f", driver {driver}"
    ok = supports(capability)
    step = "" if ok else f"use one of capability {_dotted(MIN_CAPABILITY)} (Ampere) or newer"
    yield Check("GPU", ok, True, name, step)


def _dotted(capability: Capability) -> str:
    return ".".join(map(str, capability))


def _kernels() -> Iterator[Check]:
    """What would run here; says nothing that the checks before have not counted."""
    recipes = ", ".join(RECIPES)
    usable = torch.cuda.is_available() and supports(torch.cuda.get_device_capability())
    if not usable or importlib.util.find_spec("triton") is None:
        step = "they need the GPU and triton of the lines above"
        yield Check("kernels", False, False, "plain torch alone: exact and slow", step)
        yield Check("recipes", True, False, f"{recipes}, in plain torch")
        return
    yield Check("kernels", True, False, "store, extend, decode, merge, gather in Triton")
    capability = torch.cuda.get_device_capability()
    fast = loads_tiles(capability)
    found = "yes" if fast else f"no: capability {_dotted(capability)} has no asynchronous tiles"
    step = "" if fast else f"decode serves instead; {_dotted(ASYNC_TILES_CAPABILITY)} or newer"
    yield Check("decode_fast", fast, False, found, step)
    yield _prefill(capability)
    yield Check("recipes", True, False, recipes)


def _prefill(capability: Capability) -> Check:
    """What attends in prefill for a model like Llama 3.1 8B, if nothing overrides it."""
    # Not at the top: it needs Triton.
    from inkling_backend.attention import flashinfer_extend

    recipe = get_recipe("mxfp8")
    layout = CacheLayout(recipe.k, recipe.v, 8, 128, 128)
    spec = AttentionSpec(32, layout, torch.bfloat16, recipe.quantize_query)
    reasons = flashinfer_extend.reasons_against(spec, 131072, capability)
    if reasons:
        return Check("prefill", False, False, "the Triton kernel", "; ".join(reasons))
    return Check("prefill", True, False, "FlashInfer's FA3, compiled at the first prefill")


def _environment() -> Iterator[Check]:
    for name, read in (("INKLING_KERNELS", env.kernels), ("INKLING_EXTEND", env.extend)):
        try:
            chosen = read()
        except InklingError as error:
            yield Check(name, False, True, str(error), "unset it")
            continue
        step = "plain torch: serve with --disable-cuda-graph" if chosen == "reference" else ""
        yield Check(name, True, True, chosen, step)


def _engine() -> Iterator[Check]:
    version = _version("sglang")
    if version is None:
        yield Check("SGLang", False, True, "not installed", _INSTALL)
    else:
        reason = version_reason(version)
        yield Check("SGLang", reason is None, True, version, reason or "")
    seen = is_visible()
    step = "" if seen else REMEDY
    yield Check("plugin visible", seen, True, "yes" if seen else "no entry point", step)
    allowed = os.environ.get("SGLANG_PLUGINS")
    if allowed and PLUGIN not in {name.strip() for name in allowed.split(",")}:
        step = f"unset SGLANG_PLUGINS, or add {PLUGIN} to it"
        yield Check("plugin allowed", False, True, f"SGLANG_PLUGINS={allowed}", step)


def _offer() -> Check:
    """Whether the engine, asked in a process of its own, offers the backend."""
    name = "plugin works"
    try:
        done = subprocess.run(
            [sys.executable, "-m", _CHECK], capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Check(name, False, True, f"no answer in {_SECONDS} s", f"run python -m {_CHECK}")
    if done.returncode == 0:
        return Check(name, True, True, f"the engine offers --attention-backend {PLUGIN}")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    found = lines[-1] if lines else f"status {done.returncode}"
    return Check(name, False, True, found, f"mend that; python -m {_CHECK} says it again")


def _flashinfer() -> Check:
    version = _version("flashinfer-python")
    return Check("FlashInfer", version is not None, False, version or "not installed", "")
