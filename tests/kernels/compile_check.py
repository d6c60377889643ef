"""Compiles kernels for GPUs that are not here, and reads what they use.

Run as a program, because a process that interprets kernels cannot compile them:
``python -m tests.kernels.compile_check < selection.json``, where the selection is a list of
``[case name, architecture]``. Prints one JSON object a line.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import inkling_backend.kernels
from inkling_backend.kernels.compile_case import CompileCase


@cache
def all_cases() -> dict[str, CompileCase]:
    """Every case of every kernel module, by name."""
    found: dict[str, CompileCase] = {}
    for module in pkgutil.iter_modules(inkling_backend.kernels.__path__):
        loaded = importlib.import_module(f"inkling_backend.kernels.{module.name}")
        for case in getattr(loaded, "compile_cases", list)():
            assert case.name not in found, f"two compile cases are named {case.name}"
            found[case.name] = case
    return found


def compile_case(case: CompileCase, arch: int) -> dict[str, Any]:
    """Compile for ``sm_{arch}``; gives shared bytes, registers, stack bytes and the PTX."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature, attrs = {}, {}
    for index, name in enumerate(names):
        kind = case.signature.get(name, "constexpr")
        if kind.startswith("*") or kind.endswith(":16"):
            attrs[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind.removesuffix(":16")
    missing = [n for n in names if signature[n] == "constexpr" and n not in case.constexprs]
    assert not missing, f"{case.name} says nothing about {missing}"
    compiled = triton.compile(
        ASTSource(case.kernel, signature, dict(case.constexprs), attrs),
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages},
    )
    registers, stack = _resources(compiled.asm["cubin"])
    return {
        "shared": compiled.metadata.shared,
        "registers": registers,
        "stack": stack,
        # Exponentials may flush: a probability below 2**-126 is zero anyway.
        "ftz": len(re.findall(r"(?<!ex2\.approx)\.ftz", compiled.asm["ptx"])),
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of stack a thread: spilled registers live there."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        text = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", text)
    assert len(usage) == 1, text
    return int(usage[0][0]), int(usage[0][1])


def _checked(name: str, arch: int) -> dict[str, Any]:
    try:
        result = compile_case(all_cases()[name], arch)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    return {"case": name, "arch": arch, **result}


def check(selection: list[tuple[str, int]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Compile a selection in a process of its own that does not interpret."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_check"],
        input=json.dumps(selection),
        cwd=Path(__file__).parents[2],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {(row["case"], row["arch"]): row for row in rows}


def main() -> None:
    """Answer the selection on standard input."""
    selection = json.load(sys.stdin)
    with ProcessPoolExecutor(max_workers=min(os.cpu_count() or 1, 8)) as pool:
        for row in pool.map(_checked, *zip(*selection, strict=True)):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
