"""What a GPU can do, asked by capability: the only place that knows compute capability numbers."""

from __future__ import annotations

import torch

Capability = tuple[int, int]

MIN_CAPABILITY: Capability = (8, 0)
# The oldest with conversions to and from E4M3.
FP8_CAPABILITY: Capability = (8, 9)
# The oldest with a tensor memory accelerator, which loads whole tiles asynchronously, and with
# programmatic dependent launch.
ASYNC_TILES_CAPABILITY: Capability = (9, 0)
# The one generation with warpgroup matrix instructions.
FA3_MAJOR = 9
# The one with block-scaled matrix instructions that FA4 is written for.
FA4_MAJOR = 10

_KIB = 1024
_SMALLEST_SHARED = 99 * _KIB
# Shared memory that one block may opt into, from the CUDA programming guide's table.
_SHARED_LIMIT: dict[Capability, int] = {
    (8, 0): 163 * _KIB,
    (8, 6): 99 * _KIB,
    (8, 7): 163 * _KIB,
    (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB,
    (10, 0): 227 * _KIB,
    (10, 3): 227 * _KIB,
    (11, 0): 227 * _KIB,
    (12, 0): 99 * _KIB,
    (12, 1): 99 * _KIB,
}

# The architectures whose kernels are compiled and checked in the tests.
CHECKED_CAPABILITIES: tuple[Capability, ...] = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))


def capability_of(device: torch.device) -> Capability | None:
    """Compute capability of a CUDA device, None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def supports(capability: Capability) -> bool:
    """Whether the kernels run on such a GPU."""
    return capability >= MIN_CAPABILITY


def converts_to_fp8(capability: Capability) -> bool:
    """Whether such a GPU converts float32 to E4M3 by an instruction."""
    return capability >= FP8_CAPABILITY


def loads_tiles(capability: Capability) -> bool:
    """Whether such a GPU has a tensor memory accelerator."""
    return capability >= ASYNC_TILES_CAPABILITY


def places_early(capability: Capability) -> bool:
    """Whether such a GPU places a kernel while the one before it still runs, if asked to."""
    return capability >= ASYNC_TILES_CAPABILITY


def runs_fa3(capability: Capability) -> bool:
    """Whether FlashAttention 3 runs on such a GPU: Hopper, and nothing before or after it."""
    return capability[0] == FA3_MAJOR


def runs_fa4(capability: Capability) -> bool:
    """Whether FlashAttention 4's block-scaled kernel runs on such a GPU."""
    return capability[0] == FA4_MAJOR


def shared_memory_limit(capability: Capability) -> int:
    """Bytes of shared memory one block may use; the smallest known for an unknown GPU."""
    return _SHARED_LIMIT.get(capability, _SMALLEST_SHARED)
