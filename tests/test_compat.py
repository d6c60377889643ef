"""The public helpers against recorded bytes, and their handling of shapes, dtypes and errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from triton import knobs

import inkling_backend as ib

GOLDEN = np.load(Path(__file__).parent / "golden" / "golden.npz")
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
POISON = 0xA5


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def golden(key: str, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A recorded array; ``dtype`` reinterprets bit patterns."""
    array = torch.from_numpy(GOLDEN[key].copy()).to(device)
    return array if dtype is None else array.view(dtype)


def groups(prefix: str, depth: int) -> list[str]:
    return sorted({"/".join(k.split("/")[:depth]) for k in GOLDEN.files if k.startswith(prefix)})


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bit patterns with both zeros the same."""
    x = torch.where(x == 0, torch.zeros_like(x), x)
    return x.view(torch.int16 if x.dtype.itemsize == 2 else torch.int32)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected), f"{(actual != expected).sum()} of {actual.numel()} differ"


def test_every_recorded_group_is_tested() -> None:
    tested = {"to_mxfp8", "quant_store", "seqblocked", "kvfp4"}
    assert {key.split("/")[0] for key in GOLDEN.files} == tested


@pytest.mark.parametrize("group", groups("to_mxfp8", 3))
def test_mxfp8_recorded(group: str, device: str) -> None:
    x = golden(f"{group}/x", device, DTYPES[group.split("/")[1]])
    q = ib.to_mxfp8(x)
    assert q.data.dtype == torch.float8_e4m3fn
    assert_same(q.scale, golden(f"{group}/scale", device))
    assert_same(q.data.view(torch.uint8), golden(f"{group}/data", device))
    back = golden(f"{group}/back_bf16", device, torch.bfloat16)
    assert_same(bits(ib.from_mxfp8(q)), bits(back))
    e8m0 = ib.MXFP8Tensor(q.data, q.scale.view(torch.float8_e8m0fnu))
    assert_same(bits(ib.from_mxfp8(e8m0)), bits(back))


@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("cache_dtype", [torch.uint8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", groups("quant_store", 2))
def test_quant_store_recorded(
    group: str, cache_dtype: torch.dtype, loc_dtype: torch.dtype, device: str
) -> None:
    page_size = int(group.rsplit("p", 1)[1])
    k = golden(f"{group}/k", device, torch.bfloat16)
    v = golden(f"{group}/v", device, torch.bfloat16)
    names = ("k_cache", "v_cache", "sfk", "sfv")
    expected = [golden(f"{group}/{name}", device) for name in names]
    buffers = [torch.full_like(x, POISON) for x in expected]
    scale_dtype = torch.uint8 if cache_dtype == torch.uint8 else torch.float8_e8m0fnu
    views = [x.view(cache_dtype) for x in buffers[:2]] + [x.view(scale_dtype) for x in buffers[2:]]
    loc = golden(f"{group}/loc", device).to(loc_dtype)
    ib.quant_store_kv_mxfp8(k, v, loc, *views, page_size=page_size)
    for got, want in zip(buffers, expected, strict=True):
        assert_same(got, want)


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_quant_store_takes_larger_pages(
    kernels: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "triton" and device == "cpu" and not knobs.runtime.interpret:
        pytest.skip("kernels run on the CPU only in Triton's interpreter")
    monkeypatch.setenv("INKLING_KERNELS", kernels)
    page, slot, heads = 256, 256 + 100, 2
    rows = torch.randn(1, heads, 64, generator=torch.Generator().manual_seed(0)).to(device)
    data = [torch.zeros(2, page, heads, 64, dtype=torch.uint8, device=device) for _ in "kv"]
    scales = [torch.zeros(2 * heads * page * 2, dtype=torch.uint8, device=device) for _ in "kv"]
    loc = torch.tensor([slot], device=device)
    ib.quant_store_kv_mxfp8(rows, rows, loc, *data, *scales, page_size=page)
    want = ib.to_mxfp8(rows[0])
    for got, scale in zip(data, scales, strict=True):
        assert torch.equal(got[1, 100], want.data.view(torch.uint8))
        # (page, head, slot % 32, slot % page // 32, block)
        ordered = scale.view(2, heads, 32, page // 32, 2)
        assert torch.equal(ordered[1, :, 100 % 32, 100 // 32], want.scale)


def test_quant_store_takes_flat_scales_strided_rows_and_negative_slots(device: str) -> None:
    gen = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 6, 64, generator=gen).bfloat16().to(device)
    k, v = qkv[:, 2:4], qkv[:, 4:6]
    loc = torch.tensor([3, -1, 130, 0, -5], device=device)
    shape = (2, 128, 2, 64)
    results = []
    for rows, slots in (((k, v), loc), ((k[::2], v[::2]), torch.tensor([3, 130, -7]))):
        buffers = [torch.full(shape, POISON, dtype=torch.uint8, device=device) for _ in "kv"]
        scales = [torch.full((1024,), POISON, dtype=torch.uint8, device=device) for _ in "kv"]
        ib.quant_store_kv_mxfp8(*rows, slots.to(device), *buffers, *scales)
        results.append([*buffers, *scales])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    touched = (results[0][0] != POISON).flatten(2).any(-1).nonzero()
    assert touched.tolist() == [[0, 3], [1, 2]]


def test_quant_store_of_nothing(device: str) -> None:
    buffers = [torch.full((128, 1, 32), POISON, dtype=torch.uint8, device=device) for _ in "kv"]
    scales = [torch.full((128,), POISON, dtype=torch.uint8, device=device) for _ in "kv"]
    rows = torch.empty(0, 1, 32, dtype=torch.bfloat16, device=device)
    loc = torch.empty(0, dtype=torch.int64, device=device)
    ib.quant_store_kv_mxfp8(rows, rows, loc, *buffers, *scales)
    assert all((x == POISON).all() for x in (*buffers, *scales))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("k", lambda x: x[0], "k: expected shape"),
        ("v", lambda x: x[:, :1], "v: expected shape"),
        ("k", lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "k: expected unit stride"),
        ("k_cache", lambda x: x[:100], "k_cache: expected a multiple of"),
        ("v_cache", lambda x: x[:128], "v_cache: expected bytes in all"),
        ("v_cache", lambda x: x.transpose(0, 1), "v_cache: expected strides contiguous"),
        ("k_cache", lambda x: x.to(torch.int16), "k_cache: expected a dtype of one byte"),
        ("sfk", lambda x: x[1:], "sfk: expected bytes in all"),
        ("sfv", lambda x: x.float(), "sfv: expected a dtype of one byte"),
        ("loc", lambda x: x[None], "slots: expected"),
    ],
)
def test_quant_store_names_the_bad_tensor(name: str, change, message: str, device: str) -> None:
    args = {
        "k": torch.zeros(3, 2, 64, device=device),
        "v": torch.zeros(3, 2, 64, device=device),
        "loc": torch.tensor([1, 2, 3], device=device),
        "k_cache": torch.zeros(256, 2, 64, dtype=torch.uint8, device=device),
        "v_cache": torch.zeros(256, 2, 64, dtype=torch.uint8, device=device),
        "sfk": torch.zeros(1024, dtype=torch.uint8, device=device),
        "sfv": torch.zeros(1024, dtype=torch.uint8, device=device),
    }
    ib.quant_store_kv_mxfp8(**args)
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=message):
        ib.quant_store_kv_mxfp8(**args)


@pytest.mark.parametrize("group", groups("seqblocked", 2))
def test_seqblocked_recorded(group: str, device: str) -> None:
    steps = groups(f"{group}/", 3)
    assert len(steps) == 5
    cache = torch.zeros_like(golden(f"{steps[0]}/v_cache", device))
    sfv = torch.zeros_like(golden(f"{steps[0]}/sfv", device))
    for step in steps:
        v = golden(f"{step}/v", device, torch.bfloat16)
        loc = golden(f"{step}/loc", device)
        ib.update_mxfp8_v_cache_seqblocked(v, loc, cache.view(torch.float8_e4m3fn), sfv)
        assert_same(sfv, golden(f"{step}/sfv", device))
        assert_same(cache, golden(f"{step}/v_cache", device))


def seqblocked_buffers(pages: int, page: int, heads: int, dim: int, device: str):
    cache = torch.zeros(pages, page, heads, dim, dtype=torch.float8_e4m3fn, device=device)
    sfv = torch.zeros(pages, heads, dim, page // 32, dtype=torch.uint8, device=device)
    return cache, sfv


def test_seqblocked_increments_equal_one_append(device: str, monkeypatch) -> None:
    # Small chunks: several runs per append fall into different chunks, dead ones included.
    monkeypatch.setattr("inkling_backend.reference.seqblocked._MAX_ELEMENTS", 32 * 2 * 32 * 2)
    gen = torch.Generator().manual_seed(1)
    v = (torch.randn(100, 2, 32, generator=gen) * 3).bfloat16().to(device)
    loc = torch.arange(32, 132, device=device)
    whole, pieces = (seqblocked_buffers(3, 64, 2, 32, device) for _ in range(2))
    ib.update_mxfp8_v_cache_seqblocked(v, loc, *whole)
    start = 0
    for size in (1, 2, 30, 40, 27):
        part = slice(start, start + size)
        ib.update_mxfp8_v_cache_seqblocked(v[part], loc[part].int(), *pieces)
        start += size
    assert torch.equal(whole[1], pieces[1])
    # Offline: the scale of a block is that of its largest value.
    blocks = v[:32].permute(1, 2, 0)  # [H, D, 32 tokens], the slots 32..63
    expected = ib.to_mxfp8(blocks)
    assert torch.equal(whole[1][0, :, :, 1], expected.scale[..., 0])
    got = whole[0][0, 32:64].view(torch.uint8).permute(1, 2, 0)
    assert torch.equal(got, expected.data.view(torch.uint8))
    a, b = (x[0].float() for x in (whole, pieces))
    assert torch.where(a.abs() >= 2**-6, a != b, (a - b).abs() > 2**-9).sum() == 0


def test_seqblocked_ignores_padding_and_order(device: str) -> None:
    gen = torch.Generator().manual_seed(2)
    v = torch.randn(6, 1, 32, generator=gen).to(device)
    loc = torch.tensor([40, 33, 34, 0, 1, 100], device=device)
    plain, padded = (seqblocked_buffers(2, 64, 1, 32, device) for _ in range(2))
    ib.update_mxfp8_v_cache_seqblocked(v, loc, *plain)
    junk = torch.full((1, 1, 32), torch.nan, device=device)
    order = [5, 3, 0, 2, 1, 4]
    v2 = torch.cat([junk, v[order], junk])
    loc2 = torch.cat([torch.tensor([-1], device=device), loc[order], loc.new_tensor([-9])])
    ib.update_mxfp8_v_cache_seqblocked(v2, loc2, *padded)
    for got, want in zip(padded, plain, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
    before = [x.clone() for x in padded]
    for n in (0, 3):
        pad = torch.full((n,), -1, device=device)
        ib.update_mxfp8_v_cache_seqblocked(v[:n], pad, *padded)
    for got, want in zip(padded, before, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_seqblocked_page_reuse_forgets_the_old_scale(device: str) -> None:
    used, fresh = (seqblocked_buffers(1, 32, 1, 32, device) for _ in range(2))
    loc = torch.arange(32, device=device)
    ib.update_mxfp8_v_cache_seqblocked(torch.full((32, 1, 32), 3e4, device=device), loc, *used)
    small = torch.full((2, 1, 32), 1e-3, device=device)
    for buffers in (used, fresh):
        ib.update_mxfp8_v_cache_seqblocked(small, loc[:2], *buffers)
    assert torch.equal(used[1], fresh[1])
    assert torch.equal(used[0].float(), fresh[0].float())


def test_seqblocked_non_finite_stays_alone(device: str) -> None:
    cache, sfv = seqblocked_buffers(1, 32, 1, 32, device)
    v = torch.ones(3, 1, 32, device=device)
    v[1, 0, 4], v[2, 0, 5] = torch.nan, torch.inf
    ib.update_mxfp8_v_cache_seqblocked(v, torch.arange(3, device=device), cache, sfv)
    assert torch.equal(cache[0, :3].float().isnan(), ~v.isfinite())
    assert sfv.unique().tolist() == [127 - 8]


def test_seqblocked_names_the_bad_tensor(device: str) -> None:
    v, loc = torch.zeros(2, 1, 32, device=device), torch.arange(2, device=device)
    cache, sfv = seqblocked_buffers(1, 32, 1, 32, device)
    bad = {
        "v:": (v[0], loc, cache, sfv),
        "loc:": (v, loc[:1], cache, sfv),
        "v_cache: expected shape": (v, loc, cache[..., :16], sfv),
        "v_cache: expected dtype": (v, loc, cache.view(torch.uint8), sfv),
        "v_cache: expected page_size": (v, loc, cache[:, :16], sfv),
        "sfv: expected shape": (v, loc, cache, sfv[..., :0]),
        "sfv: expected dtype": (v, loc, cache, sfv.float()),
    }
    for message, args in bad.items():
        with pytest.raises(ValueError, match=message):
            ib.update_mxfp8_v_cache_seqblocked(*args)


@pytest.mark.parametrize("group", groups("kvfp4", 3))
def test_kvfp4_recorded(group: str, device: str) -> None:
    x = golden(f"{group}/x", device, DTYPES[group.split("/")[1]])
    packed, scale = ib.BlockFP4KVQuantizeUtil.batched_quantize(x)
    assert_same(packed, golden(f"{group}/compiled/packed", device))
    assert_same(scale, golden(f"{group}/compiled/scale", device))
    back = ib.BlockFP4KVQuantizeUtil.batched_dequantize(packed, scale)
    assert_same(bits(back), bits(golden(f"{group}/compiled/back", device, torch.bfloat16)))


def test_kvfp4_blocks_run_over_rows(device: str) -> None:
    x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(3)).to(device)
    packed, scale = ib.BlockFP4KVQuantizeUtil.batched_quantize(x)
    assert packed.shape == (3, 4, 4)
    assert scale.shape == (3, 2)
    wide, wide_scale = ib.BlockFP4KVQuantizeUtil.batched_quantize(x.view(3, 1, 32))
    assert torch.equal(packed.flatten(), wide.flatten())
    assert torch.equal(scale, wide_scale)
    back = ib.BlockFP4KVQuantizeUtil.batched_dequantize(packed, scale, torch.float32)
    assert back.shape == x.shape
    assert back.dtype == torch.float32
    for bad in (x[0], x[..., :7], x[:, :1]):
        with pytest.raises(ValueError, match=r"(tensor|x): expected"):
            ib.BlockFP4KVQuantizeUtil.batched_quantize(bad)
    with pytest.raises(ValueError, match="scale_factors: expected shape"):
        ib.BlockFP4KVQuantizeUtil.batched_dequantize(packed, scale[:, :1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_nvfp4_shapes_and_values(dtype: torch.dtype, device: str) -> None:
    x = (torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(4)) * 5).to(device, dtype)
    g = torch.tensor(0.03, device=device)
    data, scale, passed = ib.NVFP4KVQuantizeUtil.quantize(x, g)
    assert (data.shape, data.dtype) == ((2, 3, 32), torch.uint8)
    assert (scale.shape, scale.dtype) == ((2, 3, 4), torch.float8_e4m3fn)
    assert torch.equal(passed, g[None])
    back = ib.NVFP4KVQuantizeUtil.dequantize(data, scale, g, torch.float32)
    # Half the widest gap between codes, 1, in steps of scale * g; the scale is within 1/16.
    blocks = x.float().unflatten(-1, (4, 16))
    amax = blocks.abs().amax(-1, keepdim=True)
    error = (back.unflatten(-1, (4, 16)) - blocks).abs()
    assert (error <= amax / 6 * (1 + 1 / 16) + amax * (1 / 16)).all()
    for other in (g[None], float(g)):
        again = ib.NVFP4KVQuantizeUtil.quantize(x, other)
        assert torch.equal(again[0], data)
        assert torch.equal(again[1].view(torch.uint8), scale.view(torch.uint8))
        assert again[2].shape == (1,)
        value = ib.NVFP4KVQuantizeUtil.dequantize(data, scale, other, torch.float32)
        assert torch.equal(value, back)


def test_nvfp4_names_the_bad_tensor(device: str) -> None:
    x = torch.zeros(1, 1, 32, device=device)
    data, scale, g = ib.NVFP4KVQuantizeUtil.quantize(x, 1.0)
    with pytest.raises(ValueError, match="x: expected last dimension a multiple of 16"):
        ib.NVFP4KVQuantizeUtil.quantize(x[..., :24], 1.0)
    with pytest.raises(ValueError, match="global_scale: expected elements 1"):
        ib.NVFP4KVQuantizeUtil.quantize(x, torch.ones(2, device=device))
    with pytest.raises(ValueError, match="block_scales: expected shape"):
        ib.NVFP4KVQuantizeUtil.dequantize(data, scale[..., :1], g)
    with pytest.raises(ValueError, match="quant_tensor: expected a dtype of one byte"):
        ib.NVFP4KVQuantizeUtil.dequantize(data.short(), scale, g)


def test_to_mxfp8_refuses_a_partial_block(device: str) -> None:
    with pytest.raises(ValueError, match="last dimension a multiple of 32, got"):
        ib.to_mxfp8(torch.zeros(2, 48, device=device))
    q = ib.to_mxfp8(torch.zeros(2, 64, device=device))
    with pytest.raises(ValueError, match="scale: expected shape"):
        ib.from_mxfp8(ib.MXFP8Tensor(q.data, q.scale[:, :1]))


def test_constants_and_enum() -> None:
    assert (ib.MXFP8_BLOCK_SIZE, ib.E2M1_MAX, ib.MAX_BLOCK_SCALE_FP8) == (32, 6.0, 448.0)
    assert [(r.name, r.value) for r in ib.FP4KVCacheRecipe] == [("MXFP4", 1), ("NVFP4", 2)]
    assert all(hasattr(ib, name) for name in ib.__all__)


def test_import_needs_torch_only() -> None:
    code = (
        "import sys, torch, inkling_backend\n"
        "names = ('inkling_backend.kernels', 'inkling_backend.engines', 'sglang', 'flashinfer')\n"
        "bad = [m for m in sys.modules if m.startswith(names)]\n"
        "assert not bad, bad\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA graph needs a GPU")
def test_seqblocked_is_capturable() -> None:
    device = "cuda"
    v = torch.randn(4, 2, 32, device=device)
    loc = torch.tensor([-1, 33, 34, 70], device=device)
    eager, graphed = (seqblocked_buffers(2, 64, 2, 32, device) for _ in range(2))
    ib.update_mxfp8_v_cache_seqblocked(v, loc, *eager)
    ib.update_mxfp8_v_cache_seqblocked(v, torch.full_like(loc, -1), *graphed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ib.update_mxfp8_v_cache_seqblocked(v, loc, *graphed)
    graph.replay()
    for got, want in zip(graphed, eager, strict=True):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
