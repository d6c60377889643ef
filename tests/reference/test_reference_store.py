"""Store and gather in plain torch: which bytes are written, and that they read back."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.errors import InvalidTensorError, UnknownNameError
from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.reference import gather, store

PAIRS = [
    ("mxfp8", "mxfp8"),
    ("nvfp4", "nvfp4"),
    ("kvfp4", "kvfp4"),
    ("mxfp4", "mxfp4"),
    ("bf16", "bf16"),
    ("mxfp8", "nvfp4"),
]
POISON = 0xA5


def make_cache(
    k: str = "mxfp8",
    v: str = "mxfp8",
    heads: int = 2,
    dk: int = 64,
    dv: int = 96,
    page: int = 64,
    pages: int = 3,
) -> LayerCache:
    """Buffers filled with poison; K and V have different global scales."""
    layout = CacheLayout(get_format(k), get_format(v), heads, dk, dv, page)
    buffers = {}
    for name, side, g in (("k", layout.k, 0.02), ("v", layout.v, 0.05)):
        data = torch.full(layout.data_shape(side, pages), 0, dtype=side.format.data_dtype)
        data.view(torch.uint8).fill_(POISON)
        buffers[f"{name}_data"] = data
        if side.format.block:
            shape = layout.scale_shape(side, pages)
            buffers[f"{name}_scale"] = torch.full(shape, POISON, dtype=torch.uint8)
        if side.format.has_global_scale:
            buffers[f"{name}_global"] = torch.tensor([g])
    return LayerCache(layout, **buffers)


def rows(tokens: int, cache: LayerCache, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    layout, gen = cache.layout, torch.Generator().manual_seed(seed)
    shape = tokens, layout.num_kv_heads
    k = torch.randn(*shape, layout.k_head_dim, generator=gen).bfloat16()
    return k, (3 * torch.randn(*shape, layout.v_head_dim, generator=gen)).bfloat16()


@pytest.mark.parametrize("page", [32, 64, 128])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_every_byte_is_where_the_layout_says(k_format: str, v_format: str, page: int) -> None:
    cache = make_cache(k_format, v_format, page=page)
    slots = torch.tensor([1, page - 1, page, page + 33, 2 * page + 31, 5], dtype=torch.int32)
    k, v = rows(len(slots), cache)
    assert store(k, v, slots, cache) is None
    layout = cache.layout
    for side, x, data, scale, g in (
        (layout.k, k, cache.k_data, cache.k_scale, cache.k_global),
        (layout.v, v, cache.v_data, cache.v_scale, cache.v_global),
    ):
        q = side.format.quantize(x, g)
        assert torch.equal(data[slots], q.data)
        untouched = torch.ones(len(data), dtype=torch.bool)
        untouched[slots.long()] = False
        assert (data[untouched].view(torch.uint8) == POISON).all()
        if scale is None:
            continue
        expected = torch.full_like(scale, POISON)
        sf, name = side.blocks, side.format.name
        for i, slot in enumerate(slots.tolist()):
            p, t = divmod(slot, page)
            for h in range(layout.num_kv_heads):
                for b in range(sf):
                    if name == "mxfp8":
                        at = (t % 32) * (page // 32) * sf + (t // 32) * sf + b
                    elif x is v:
                        at = b * page + t
                    else:
                        at = t * sf + b
                    expected[p, h, at] = q.scale[i, h, b]
        assert torch.equal(scale, expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_padding_slots_write_nothing(k_format: str, v_format: str, dtype: torch.dtype) -> None:
    cache, plain = (make_cache(k_format, v_format) for _ in range(2))
    slots = torch.tensor([0, 7, -1, 0, 130, -128], dtype=dtype)
    k, v = rows(len(slots), cache)
    k[2], v[3] = torch.nan, torch.inf
    store(k, v, slots, cache)
    store(k[[1, 4]], v[[1, 4]], slots[[1, 4]], plain)
    for name in ("k_data", "v_data", "k_scale", "v_scale"):
        got, want = getattr(cache, name), getattr(plain, name)
        if want is not None:
            assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    for data in (cache.k_data, cache.v_data):
        assert (data[0].view(torch.uint8) == POISON).all()


def test_all_padding_and_no_tokens() -> None:
    cache = make_cache("kvfp4", "nvfp4")
    k, v = rows(3, cache)
    store(k, v, torch.tensor([0, -1, 0]), cache)
    store(k[:0], v[:0], torch.empty(0, dtype=torch.int64), cache)
    for name in ("k_data", "v_data", "k_scale", "v_scale"):
        assert (getattr(cache, name) == POISON).all()


@pytest.mark.parametrize(("k_format", "v_format"), PAIRS)
def test_gather_reads_back(k_format: str, v_format: str) -> None:
    cache = make_cache(k_format, v_format)
    slots = torch.tensor([150, 3, 64, 90])
    k, v = rows(4, cache)
    store(k, v, slots, cache)
    layout = cache.layout
    for name, side, x, g in (
        ("k", layout.k, k, cache.k_global),
        ("v", layout.v, v, cache.v_global),
    ):
        values = side.format.dequantize(side.format.quantize(x, g), g)
        order = torch.tensor([2, 0, 3])
        got = gather(slots[order], cache, name, torch.float32)
        assert torch.equal(got, values[order])
        padded = gather(torch.tensor([-1, 3]), cache, name)
        assert padded.dtype == torch.bfloat16
        assert torch.equal(padded, torch.stack([values[1] * 0, values[1]]).bfloat16())
        error = (values - x.float()).abs().max() / x.float().abs().max()
        assert error < (0.05 if side.format.name in ("mxfp8", "bf16") else 0.3)


def test_query_comes_back_as_asked() -> None:
    cache = make_cache(dv=64)
    k, v = rows(2, cache)
    q = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(1)).half()
    slots = torch.tensor([1, 2])
    kept = store(k, v, slots, cache, q=q)
    assert kept.scale is None
    assert torch.equal(kept.data, q)
    coded = store(k, v, slots, cache, q=q, quantize_q=True)
    expected = get_format("mxfp8").quantize(q, None)
    assert torch.equal(coded.data, expected.data)
    assert torch.equal(coded.scale, expected.scale)


def test_strided_inputs_of_a_fused_projection() -> None:
    cache, plain = (make_cache(dv=64) for _ in range(2))
    fused = torch.randn(4, 8 * 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    k, v = (fused[:, s : s + 128].view(4, 2, 64) for s in (256, 384))
    slots = torch.tensor([4, 3, 2, 1])
    store(k, v, slots, cache)
    store(k.contiguous(), v.contiguous(), slots, plain)
    assert torch.equal(cache.k_data, plain.k_data)
    assert torch.equal(cache.v_scale, plain.v_scale)


def test_bad_tensors_are_named() -> None:
    cache = make_cache()
    k, v = rows(3, cache)
    slots = torch.tensor([1, 2, 3])
    q = torch.zeros(3, 4, 64)
    for match, args, kwargs in (
        ("k: expected shape", (k[:2], v, slots, cache), {}),
        ("v: expected shape", (k, v[..., :64], slots, cache), {}),
        ("v: expected dtype", (k, v.int(), slots, cache), {}),
        ("slots: expected shape", (k, v, slots[None], cache), {}),
        ("slots: expected dtype", (k, v, slots.short(), cache), {}),
        ("k: expected device", (k.to("meta"), v, slots, cache), {}),
        ("q: expected shape", (k, v, slots, cache), {"q": q[..., :32]}),
    ):
        with pytest.raises(InvalidTensorError, match=match):
            store(*args, **kwargs)
    with pytest.raises(UnknownNameError, match="side"):
        gather(slots, cache, "q")
    with pytest.raises(InvalidTensorError, match="slots"):
        gather(slots.float(), cache)
