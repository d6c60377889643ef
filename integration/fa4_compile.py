"""Hands FA4 what `attention.fa4` makes of our pages, and has it compile its SM100 kernels for that.

Needs no GPU: tensors have shapes and types but no data, so FA4 checks them, compiles, and does not
launch. Prints a line a layer. A program of its own, because FA4 reads its environment at import.
"""

from __future__ import annotations

import os

TARGET = {"FLASH_ATTENTION_ARCH": "sm_100", "CUTE_DSL_ARCH": "sm_100a"}
REQUESTS, QUERY_HEADS, KV_HEADS, PAGES, ROWS = 3, 8, 2, 9, 40


def main() -> None:
    """Compile for each kind of layer."""
    os.environ.update(TARGET)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from inkling_backend.attention import LayerAttention
    from inkling_backend.attention.fa4 import HEAD_DIM, PAGE_SIZE, masks, operands
    from inkling_backend.engines.sglang import versions
    from inkling_backend.formats import Query, get_format
    from inkling_backend.formats.layout import CacheLayout, LayerCache

    def zeros(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    attend, mxfp8 = versions.fa4(), get_format("mxfp8")
    layout = CacheLayout(mxfp8, mxfp8, KV_HEADS, HEAD_DIM, HEAD_DIM, PAGE_SIZE)
    with FakeTensorMode():
        cache = LayerCache(
            layout,
            zeros(*layout.data_shape(layout.k, PAGES)),
            zeros(*layout.data_shape(layout.v, PAGES)),
            zeros(*layout.scale_shape(layout.k, PAGES)),
            zeros(*layout.scale_shape(layout.v, PAGES)),
        )
        query = Query(
            zeros(ROWS, QUERY_HEADS, HEAD_DIM), zeros(ROWS, QUERY_HEADS, HEAD_DIM // mxfp8.block)
        )
        sinks = zeros(QUERY_HEADS, dtype=torch.float32)
        for name, layer in {
            "plain": LayerAttention(0.1),
            "window and sinks": LayerAttention(0.1, window=33, sinks=sinks),
            "soft-cap": LayerAttention(0.1, softcap=5.0),
            "bidirectional": LayerAttention(0.1, causal=False),
        }.items():
            out = attend(
                **operands(query, cache),
                **masks(layer),
                cu_seqlens_q=zeros(REQUESTS + 1, dtype=torch.int32),
                max_seqlen_q=20,
                seqused_k=zeros(REQUESTS, dtype=torch.int32),
                page_table=zeros(REQUESTS, 4, dtype=torch.int32),
            )
            print(f"{name}: {tuple(out.shape)} {out.dtype}", flush=True)


if __name__ == "__main__":
    main()
