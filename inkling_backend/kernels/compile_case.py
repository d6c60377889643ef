"""What it takes to compile one kernel without a GPU and without calling it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from inkling_backend.kernels.arch import MIN_CAPABILITY, Capability


@dataclass(frozen=True)
class CompileCase:
    """One specialization of a kernel, as a launch would make it.

    Attributes:
        name: unique name, e.g. ``decode-mxfp8-d128``.
        kernel: the `triton.jit` function.
        signature: Triton type of every run-time argument, e.g. ``{"x_ptr": "*bf16", "n": "i32"}``.
            Pointers are taken as 16-byte aligned, as allocations are; ``i32:16`` is an integer
            divisible by 16; ``constexpr`` is an argument that is None.
        constexprs: value of every ``tl.constexpr`` argument, and None for those that are None.
        num_warps, num_stages: launch options.
        capability: the oldest GPU it is for.
        spill_bytes: most bytes a thread may spill. The default is what ptxas spills by itself, for
            a lower register count, outside of the loops.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    capability: Capability = MIN_CAPABILITY
    spill_bytes: int = 64
