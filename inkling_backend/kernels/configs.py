"""Launch choices: frozen, a function of the model and the device alone, each with its reason.

Nothing here may look at a batch: the same request must run the same arithmetic in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_backend.formats.layout import CacheLayout

# Splits are cut at multiples of this many tokens: of every kernel's KV tile.
SPLIT_STEP = 64

# Query heads that one KV head may serve: their rows must fit one tile of 64 rows.
MAX_GROUP = 64

# Tokens of a split: below 256 it costs more to merge than it gains; above 1024 the start of a
# program no longer counts, and finer pieces balance better (H200, 8 KV heads; 64 x 8k, 1 x 128k).
MIN_SPLIT_TOKENS, MAX_SPLIT_TOKENS = 256, 1024

# Programs that a request should give before its splits grow: one for each SM of an H200, about.
# A constant, not the device's count: a result must not change with the device it ran on.
SPLIT_PROGRAMS = 128

# Pieces of one request at most: the merge reads their sums as one vector.
FEWEST_SPLITS, MOST_SPLITS = 8, 128

# Bytes that partial results may take before splits are made coarser.
PARTIAL_BYTES = 512 << 20

# Programs of the decode grid if no GPU is there to ask (interpreter): few, so that each loops.
PROGRAMS_WITHOUT_GPU = 3


@dataclass(frozen=True)
class SplitRule:
    """How the KV of one request is cut for decode: by its own length alone.

    Attributes:
        min_tokens: tokens of the shortest split, a multiple of ``step``.
        max_splits: no request is cut into more pieces; splits grow with the length instead.
        target: pieces that a request should have before its splits grow beyond ``min_tokens``.
        max_tokens: up to which they grow for that.
        step: splits are multiples of this many tokens.
    """

    min_tokens: int
    max_splits: int
    target: int = MOST_SPLITS
    max_tokens: int = MAX_SPLIT_TOKENS
    step: int = SPLIT_STEP

    def split_tokens(self, length: int) -> int:
        """Tokens of one split of a request of ``length`` tokens (`plan.split_tokens` in Python)."""
        wanted = min(max(-(-length // self.target), self.min_tokens), self.max_tokens)
        tokens = max(wanted, -(-length // self.max_splits))
        return -(-tokens // self.step) * self.step

    def splits(self, length: int) -> int:
        """Pieces that a request of ``length`` tokens is cut into."""
        return -(-length // self.split_tokens(length))

    def most_splits(self, max_context: int) -> int:
        """Upper bound of `splits` over all lengths up to ``max_context``."""
        grown = max(self.target, -(-max_context // self.max_tokens))
        return min(self.max_splits, grown, -(-max_context // self.min_tokens))


def split_rule(num_q_heads: int, layout: CacheLayout, max_batch: int) -> SplitRule:
    """The split rule of one runner.

    The partial results of ``max_batch`` requests, all of them long (prefixes are shared, so their
    lengths may sum to more than the pool holds), must fit `PARTIAL_BYTES`.
    """
    affordable = PARTIAL_BYTES // max(1, max_batch * partial_bytes(num_q_heads, layout))
    most = max(FEWEST_SPLITS, min(MOST_SPLITS, affordable))
    target = max(16, SPLIT_PROGRAMS // layout.num_kv_heads)
    return SplitRule(MIN_SPLIT_TOKENS, most, target)


def partial_bytes(num_q_heads: int, layout: CacheLayout) -> int:
    """Bytes of the partial result of one work item: float32 output, top and total of every head."""
    return num_q_heads * (layout.v_head_dim + 2) * 4


@dataclass(frozen=True)
class KernelConfig:
    """Tile and pipeline of one kernel.

    Attributes:
        block_m: query rows of a tile (decode: the padded group; extend: tokens x group).
        block_n: KV tokens of a tile.
        num_warps, num_stages: of the compiled kernel.
        programs_per_sm: size of a persistent grid, per SM (0: the grid is not persistent).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int = 0


def decode_config(group: int, layout: CacheLayout) -> KernelConfig:
    """Decode: memory-bound, so many small programs, each with tiles on their way.

    32 tokens in four warps keep a 128-wide MXFP8 tile at 165 registers, three programs an SM; 64
    tokens take 250. 32 also divides every page size, so that a tile lies in one page. A group of
    more than 16 rows needs eight warps not to spill, wider heads fewer stages.
    """
    rows = max(16, 1 << (group - 1).bit_length())
    warps = 4 if rows == 16 else 8
    if _is_wide(layout):
        return KernelConfig(rows, 32, warps, num_stages=2, programs_per_sm=2)
    return KernelConfig(rows, 32, warps, num_stages=3, programs_per_sm=3)


def fast_decode_config(layout: CacheLayout) -> KernelConfig:
    """`decode_fast`: few warps and deep pipelines, as many programs as an SM holds.

    Measured on an H200 (head_dim 128, 8 KV heads, groups of 4): FP4 is bound by instructions and
    best with one warp, which needs no exchange between warps; MXFP8 and BF16 move more bytes and
    take two. Five stages keep two tiles on their way, as a page number comes before them.
    """
    head_dim = max(layout.k_head_dim, layout.v_head_dim)
    bits = max(layout.k_format.element_bits, layout.v_format.element_bits)
    warps, stages, programs = _FAST_DECODE[bits, head_dim]
    return KernelConfig(8, 64, warps, stages, programs)


# (bits of the wider side's elements, head_dim) -> warps, stages, programs an SM. The programs are
# what registers and shared memory allow.
_FAST_DECODE = {
    (4, 64): (1, 5, 12),
    (4, 128): (1, 5, 8),
    (4, 256): (2, 5, 4),
    (8, 64): (2, 5, 5),
    (8, 128): (2, 5, 4),
    (8, 256): (4, 5, 2),
    (16, 64): (2, 5, 5),
    (16, 128): (2, 5, 3),
    (16, 256): (4, 3, 2),
}


def extend_config(layout: CacheLayout) -> KernelConfig:
    """Extend: compute-bound; the largest tiles that spill no register on any architecture.

    With wide heads that is 32 rows, and 32 tokens if both sides decode from 8-bit codes.
    """
    if not _is_wide(layout):
        return KernelConfig(64, 64, num_warps=8, num_stages=2)
    bytes_both = layout.k_format.element_bits == 8 and layout.v_format.element_bits == 8
    return KernelConfig(32, 32 if bytes_both else 64, num_warps=8, num_stages=2)


def _is_wide(layout: CacheLayout) -> bool:
    return max(layout.k_head_dim, layout.v_head_dim) > 128


def persistent_programs(config: KernelConfig, device: torch.device) -> int:
    """Programs of a persistent grid: the same for every launch on this device."""
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count * config.programs_per_sm
