"""How the tests, the demo and the GPU run start the engine: environment and flags in one place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from inkling_backend.formats import RECIPES as KNOWN

ROOT = Path(__file__).resolve().parent.parent
STANDIN = Path(__file__).resolve().parent / "sgl_kernel_standin"
IDLE_SECONDS = 60

# Keywords of sglang.Engine for every start. The 135M model fits anywhere, so the pool is small.
COMMON: dict[str, object] = {
    "grammar_backend": "none",
    "max_total_tokens": 4096,
    "log_level": "info",  # sglang.Engine would log errors only
}
# The CPU engine has no graphs to capture and no stream to overlap with; an idle scheduler must not
# spin on one of the two cores.
CPU: dict[str, object] = {
    "device": "cpu",
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
}
# Keywords that choose a recipe, as a user would write them.
RECIPE_FLAGS: dict[str, dict[str, object]] = {
    "mxfp8": {},
    **{name: {"fp4_kv_cache_recipe": name} for name, each in KNOWN.items() if each.has_fp4},
    "bf16": {"kv_cache_dtype": "bf16"},
}
# Alone it costs SmolLM2 its answer, in a simulated cache too: "Bonjour" is likelier than "The".
RECIPE_FLAGS["mxfp4"] |= {"inkling_key_transform": "rotate"}
RECIPES = tuple(RECIPE_FLAGS)


@cache
def has_gpu() -> bool:
    """Whether a CUDA GPU is there. Asked in a child: no CUDA context in the caller."""
    question = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", question], check=False).returncode == 0


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables of an engine process.

    Args:
        extra: further variables; a PYTHONPATH among them goes in front of the others' folders.
    """
    env = dict(os.environ)
    for name in ("TRITON_INTERPRET", "INKLING_KERNELS"):
        env.pop(name, None)
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if not has_gpu():
        path.insert(0, str(STANDIN))
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    extra = dict(extra or {})
    path.insert(0, extra.pop("PYTHONPATH", ""))
    return env | extra | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


def options(model: Path, recipe: str | None = "mxfp8", **extra: object) -> dict[str, object]:
    """Keywords of ``sglang.Engine`` for a model and a recipe; None leaves our backend out."""
    chosen: dict[str, object] = {"model_path": str(model), **COMMON}
    if not has_gpu():
        chosen |= CPU
    if recipe is not None:
        chosen |= {"attention_backend": "inkling", **RECIPE_FLAGS[recipe]}
    return chosen | extra


def command_line(keywords: Mapping[str, object]) -> list[str]:
    """The same keywords as flags of ``sglang serve``."""
    argv: list[str] = []
    for name, value in keywords.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not False and value is not None:
            argv += [flag, str(value)]
    return argv


def insist(done: Callable[[], bool], what: str) -> None:
    """Ask an engine for what it does when idle: its last batch outlives the last answer.

    Args:
        done: asks, and says whether the engine agreed.
        what: it is asked for.

    Raises:
        TimeoutError: it stayed busy.
    """
    deadline = time.monotonic() + IDLE_SECONDS
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the engine is still busy after {IDLE_SECONDS} s: no {what}")
        time.sleep(0.05)


def stop(process: subprocess.Popen, grace: float = 10.0) -> None:
    """End a process that was started in a session of its own, with all its children."""
    for sent, wait in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            break
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            continue
    process.wait(grace)
