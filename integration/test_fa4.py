"""What FA4's SM100 kernel reads, without such a GPU.

`tile_atom_to_shape_SF` of nvidia-cutlass-dsl (which the engine installs) says where the scale of
an element of a K-major operand lies; FA4 hands it one page of one head, ``page_size x head_dim``.
And the engine's copy of FA4 compiles for our operands.
"""

from __future__ import annotations

import subprocess
import sys

import cutlass
import cutlass.cute as cute
import torch
from cutlass.utils.blockscaled_layout import tile_atom_to_shape_SF

from inkling_backend import CacheLayout, get_format
from integration.launch import ROOT, environment

PAGE, HEAD_DIM, BLOCK = 128, 128, 32


def fa4_offsets() -> torch.Tensor:
    """Byte of (token, element) inside a (page, head): ``[PAGE, HEAD_DIM]``."""
    found: list[int] = []

    @cute.jit
    def evaluate() -> None:
        layout = tile_atom_to_shape_SF((PAGE, HEAD_DIM, 1), BLOCK)
        for token in cutlass.range_constexpr(PAGE):
            for element in cutlass.range_constexpr(HEAD_DIM):
                found.append(cute.crd2idx((token, element, 0), layout))

    evaluate()
    return torch.tensor(found).view(PAGE, HEAD_DIM)


def test_scale_bytes_lie_where_fa4_reads_them() -> None:
    mxfp8, heads = get_format("mxfp8"), 3
    layout = CacheLayout(mxfp8, mxfp8, heads, HEAD_DIM, HEAD_DIM, PAGE)
    offsets = fa4_offsets()
    page_head_bytes = PAGE * HEAD_DIM // BLOCK
    assert sorted(set(offsets.flatten().tolist())) == list(range(page_head_bytes))
    for page in (0, 2):
        slots = torch.arange(PAGE) + page * PAGE
        for side in (layout.k, layout.v):
            ours = layout.scale_offsets(side, slots)  # [PAGE, heads, blocks]
            for head in range(heads):
                base = (page * heads + head) * page_head_bytes
                expanded = ours[:, head].repeat_interleave(BLOCK, dim=1)
                assert torch.equal(expanded, offsets + base)


def test_fa4_takes_our_operands_and_compiles() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "integration.fa4_compile"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    layers = ("plain", "window and sinks", "soft-cap", "bidirectional")
    assert done.stdout.splitlines()[-4:] == [f"{n}: (40, 8, 128) torch.bfloat16" for n in layers]
