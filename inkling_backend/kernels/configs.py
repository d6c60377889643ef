"""Launch choices: frozen, a function of the model and the device alone, each with its reason.

Nothing here may look at a batch: the same request must run the same arithmetic in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from inkling_backend.formats.layout import CacheLayout

# Query heads that one KV head may serve, times query tokens in decode: their rows must fit one tile
# of 64 rows.
MAX_GROUP = 64

# Splits are cut at multiples of this many tokens: of every kernel's KV tile.
SPLIT_STEP = 64

# `decode`, tokens of a split: below 256 it costs more to merge than it gains; above 1024 the start
# of a program no longer counts, and finer pieces balance better (H200, 8 KV heads).
MIN_SPLIT_TOKENS, MAX_SPLIT_TOKENS = 256, 1024

# Programs that a request should give before its splits grow: one for each SM of an H200, about.
# A constant, not the device's count: a result must not change with the device it ran on.
SPLIT_PROGRAMS = 128

# `decode_fast`, tokens of a chunk: short, to fill a GPU with one request of a few thousand tokens.
CHUNK_TOKENS = 128

# `decode_fast`, tokens of the splits that the programs of an SM work on together: a split costs two
# microseconds or three to begin, but sixteen requests of 8192 tokens and eight KV heads must fill
# an H200. And of the longest: merge holds its chunks in registers.
SM_SPLIT_TOKENS, LONGEST_SPLIT = 8192, 4096

# Chunks times KV heads of a batch up to which its chunks may be work items.
CHUNK_PROGRAMS = 4096

# Programs of a merge launch, about: an H200 starts two thousand in a microsecond.
MERGE_PROGRAMS = 2048

# Bytes that partial results may take before splits are made coarser.
PARTIAL_BYTES = 512 << 20

# Programs of the decode grid if no GPU is there to ask (interpreter): few, so that each loops.
PROGRAMS_WITHOUT_GPU = 3


class SplitRule(NamedTuple):
    """How the KV of one request is cut for decode; a ``tl.constexpr`` argument of the plan.

    The result is a sum over splits, cut by the request's own length alone. A split may be a sum
    over chunks, added in order wherever it happens: by the work item that computes the split, or,
    in a batch whose work items are chunks, by the merge. So bits never depend on the batch.

    There is one exception: a batch that would need more than ``most_items`` work items has its
    splits doubled until it does not. That takes lengths which sum to many times what a GPU holds.

    Attributes:
        min_tokens: tokens of the shortest split, a multiple of ``step``.
        max_tokens: tokens of the longest, likewise.
        target: splits that a request should have before they grow beyond ``min_tokens``.
        step: splits are multiples of this many tokens, a chunk if there are chunks.
        most_items: work items that buffers have room for; no fewer than requests.
        most_chunks: chunks of a batch up to which they may be its work items; 0 if splits always
            are. What follows decides whether they are.
        heads: KV heads.
        programs: heads of work items that run at once.
    """

    min_tokens: int
    max_tokens: int
    target: int
    step: int
    most_items: int
    most_chunks: int = 0
    heads: int = 1
    programs: int = 1

    def split_tokens(self, length: int) -> int:
        """Tokens of one split of a request of ``length`` tokens (`plan.split_tokens` in Python)."""
        tokens = min(max(-(-length // self.target), self.min_tokens), self.max_tokens)
        return -(-tokens // self.step) * self.step

    @property
    def split_chunks(self) -> int:
        """Chunks of a split, where its chunks may be work items; 1 otherwise."""
        return self.min_tokens // self.step if self.most_chunks else 1

    def splits(self, length: int) -> int:
        """Pieces that a request of ``length`` tokens is cut into."""
        return -(-length // self.split_tokens(length))


def split_rule(
    num_q_heads: int, layout: CacheLayout, max_batch: int, max_context: int
) -> SplitRule:
    """The split rule of one runner for `decode`.

    Partial results take `PARTIAL_BYTES` at most, unless requests alone are so many.
    """
    target = max(16, SPLIT_PROGRAMS // layout.num_kv_heads)
    splits = max(target, -(-max_context // MAX_SPLIT_TOKENS))
    most = max_batch * min(splits, -(-max_context // MIN_SPLIT_TOKENS))
    most = min(most, _affordable(num_q_heads, layout, max_batch))
    return SplitRule(MIN_SPLIT_TOKENS, MAX_SPLIT_TOKENS, target, SPLIT_STEP, most)


def chunked_split_rule(
    num_q_heads: int,
    layout: CacheLayout,
    max_batch: int,
    max_context: int,
    config: KernelConfig,
    programs: int,
) -> SplitRule:
    """The split rule of one runner for `decode_fast`, whose grid has ``programs`` programs."""
    heads = layout.num_kv_heads
    tokens = min(LONGEST_SPLIT, SM_SPLIT_TOKENS // config.programs_per_sm)
    tokens = -(-tokens // CHUNK_TOKENS) * CHUNK_TOKENS
    chunks = CHUNK_PROGRAMS // heads
    most = max(chunks, max_batch * -(-max_context // tokens))
    most = min(most, _affordable(num_q_heads, layout, max_batch))
    return SplitRule(tokens, tokens, 1, CHUNK_TOKENS, most, min(chunks, most), heads, programs)


def _affordable(num_q_heads: int, layout: CacheLayout, max_batch: int) -> int:
    return max(max_batch, PARTIAL_BYTES // partial_bytes(num_q_heads, layout))


def partial_bytes(num_q_heads: int, layout: CacheLayout) -> int:
    """Bytes of one partial result: float32 output, top and total of every head."""
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

    @property
    def options(self) -> dict[str, int]:
        """Launch options."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


def decode_config(rows: int, layout: CacheLayout) -> KernelConfig:
    """Decode: memory-bound, so many small programs, each with tiles on their way.

    32 tokens in four warps keep a 128-wide MXFP8 tile at 165 registers, three programs an SM; 64
    tokens take 250. 32 also divides every page size, so that a tile lies in one page. More
    than 16 rows need eight warps not to spill, wider heads fewer stages.

    Args:
        rows: query heads of one KV head, times query tokens.
    """
    rows = max(16, 1 << (rows - 1).bit_length())
    warps = 4 if rows == 16 else 8
    if _is_wide(layout):
        return KernelConfig(rows, 32, warps, num_stages=2, programs_per_sm=2)
    return KernelConfig(rows, 32, warps, num_stages=3, programs_per_sm=3)


def fast_decode_config(group: int, q_len: int, layout: CacheLayout) -> KernelConfig | None:
    """`decode_fast`: few warps and deep pipelines, as many programs as an SM holds; None where it
    would not have enough registers.

    Measured on an H200 (head_dim 128, 8 KV heads, groups of 4). FP4 is bound by instructions: 64
    tokens and one warp, which needs no exchange between warps, take the fewest. MXFP8 moves more
    bytes; a tile of a whole chunk needs neither a rescaling nor a branch to begin anew, and its two
    warps get through a chunk in half the time, which counts where there are few work items. A page
    number comes before a tile, so that seven stages hold three tiles, five two, three one.

    Args:
        group: query heads of one KV head.
        q_len: query tokens of a request; as many as fit are the rows of one program.
    """
    bits = max(layout.k_format.element_bits, layout.v_format.element_bits)
    head_dim = max(layout.k_head_dim, layout.v_head_dim)
    for shares in range(1, q_len + 1):
        rows = max(8, 1 << (group * -(-q_len // shares) - 1).bit_length())
        key = (rows, bits, head_dim)
        if key in _SMALL_PAGES and layout.page_size < _FAST_DECODE[key][0]:
            return KernelConfig(rows, *_SMALL_PAGES[key])
        if key in _FAST_DECODE:
            return KernelConfig(rows, *_FAST_DECODE[key])
    return None


# (rows, bits of the wider side's elements, head_dim) -> tokens, warps, stages, programs an SM: as
# many as registers and shared memory allow.
_FAST_DECODE = {
    (8, 4, 64): (64, 1, 5, 12),
    (8, 4, 128): (64, 1, 5, 8),
    (8, 4, 256): (64, 2, 5, 4),
    (8, 8, 64): (64, 1, 7, 8),
    (8, 8, 128): (128, 2, 3, 4),
    (8, 8, 256): (32, 2, 7, 4),
    (8, 16, 64): (64, 2, 5, 5),
    (8, 16, 128): (64, 2, 5, 3),
    (8, 16, 256): (64, 4, 3, 2),
    (16, 4, 64): (64, 1, 5, 8),
    (16, 4, 128): (64, 2, 5, 4),
    (16, 4, 256): (64, 4, 5, 2),
    (16, 8, 64): (64, 1, 7, 7),
    (16, 8, 128): (32, 1, 7, 8),
    (16, 8, 256): (32, 4, 7, 2),
    (16, 16, 64): (64, 2, 5, 4),
    (16, 16, 128): (64, 2, 5, 3),
    (16, 16, 256): (64, 4, 3, 1),
    (32, 4, 64): (64, 4, 5, 2),
    (32, 8, 64): (64, 4, 5, 2),
    (32, 8, 128): (64, 4, 5, 2),
    (32, 16, 64): (64, 2, 5, 4),
    (32, 16, 128): (64, 4, 5, 1),
}

# The same, for pages shorter than the tile above.
_SMALL_PAGES = {(8, 8, 128): (32, 1, 7, 8)}


def merge_tile(batch: int, q_heads: int, head_dim: int) -> tuple[int, int]:
    """Query heads (a divisor of ``q_heads``) and columns of one program of `merge`.

    Narrow in a small batch, where long requests have many splits; several heads in a large one,
    where most requests have nothing to merge. Changes no bit.
    """
    columns = max(16, 1 << (head_dim - 1).bit_length())
    programs = batch * q_heads
    if programs * columns <= MERGE_PROGRAMS * 32:
        return 1, min(32, columns)
    most = max(1, programs // MERGE_PROGRAMS)
    return max(n for n in range(1, q_heads + 1) if q_heads % n == 0 and n <= most), columns


def extend_config(layout: CacheLayout, *, biased: bool = False) -> KernelConfig:
    """Extend: compute-bound; the largest tiles that spill no register on any architecture.

    With wide heads that is 32 rows, and 32 tokens if both sides decode from 8-bit codes. Such codes
    leave no registers on SM80 to load ahead beside the rows of sink tokens. A relative bias takes
    as many registers as logits do.

    Args:
        biased: whether logits have a relative bias.
    """
    bytes_both = layout.k_format.element_bits == 8 and layout.v_format.element_bits == 8
    if not _is_wide(layout):
        stages = 1 if bytes_both and layout.sink_tokens else 2
        return KernelConfig(32 if biased else 64, 64, num_warps=8, num_stages=stages)
    return KernelConfig(32, 32 if bytes_both else 64, num_warps=8, num_stages=2)


def _is_wide(layout: CacheLayout) -> bool:
    return max(layout.k_head_dim, layout.v_head_dim) > 128


def persistent_programs(config: KernelConfig, device: torch.device) -> int:
    """Programs of a persistent grid: the same for every launch on this device."""
    if device.type != "cuda":
        return PROGRAMS_WITHOUT_GPU
    return torch.cuda.get_device_properties(device).multi_processor_count * config.programs_per_sm
