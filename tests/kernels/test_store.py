"""The fused store against plain torch, to the last byte of every buffer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from inkling_backend import reference
from inkling_backend.errors import InvalidTensorError
from inkling_backend.formats import Query
from inkling_backend.formats.layout import LayerCache
from inkling_backend.kernels import store as store_module
from inkling_backend.kernels.store import store
from inkling_backend.transforms import rotate
from tests.kernels.helpers import (
    FORMAT_NAMES,
    FOUR_OVER_SIX,
    STORED_NAMES,
    assert_same_bits,
    assert_same_cache,
    clone_cache,
    make_cache,
    make_layout,
    special_rows,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "golden.npz"


def check_store(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, cache: LayerCache, **kwargs: Any
) -> None:
    """Runs the kernel on ``cache`` and the reference on a copy on the CPU, and compares all."""
    want_cache = clone_cache(cache, torch.device("cpu"))
    cpu = {key: x.cpu() if isinstance(x, torch.Tensor) else x for key, x in kwargs.items()}
    want = reference.store(k.cpu(), v.cpu(), slots.cpu(), want_cache, **cpu)
    got = store(k, v, slots, cache, **kwargs)
    assert_same_cache(cache, want_cache)
    assert (got is None) == (want is None)
    if got is not None and want is not None:
        assert_same_bits(got.data, want.data, "q data")
        assert_same_bits(got.scale, want.scale, "q scale")


@pytest.mark.parametrize("page", [32, 64, 128])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_formats_dims_and_pages(name: str, dim: int, page: int, device: torch.device) -> None:
    cache = make_cache(make_layout(name, name, 2, dim, page=page), 3, device)
    dtype = torch.int32 if page == 64 else torch.int64
    # Both sides of every 32-token boundary of a page, the page's ends, padding.
    slots = torch.tensor([page - 1, 0, page + 33 % page, -1, 2 * page], dtype=dtype).to(device)
    k = torch.randn(5, 2, dim).to(torch.bfloat16).to(device)
    check_store(k, torch.randn_like(k) * 7, slots, cache)


@pytest.mark.parametrize(
    ("k_name", "v_name"), list(itertools.permutations(FORMAT_NAMES, 2)), ids="-".join
)
def test_mixed_formats_and_head_dims(k_name: str, v_name: str, device: torch.device) -> None:
    cache = make_cache(make_layout(k_name, v_name, 1, 96, 64), 2, device)
    k, v = torch.randn(3, 1, 96).to(device), torch.randn(3, 1, 64).to(device)
    check_store(k, v, torch.tensor([40, 1, 63]).to(device), cache)


@pytest.mark.parametrize("name", ["nvfp4", "kvfp4", "bf16"])
def test_head_dim_that_is_a_multiple_of_16_only(name: str, device: torch.device) -> None:
    cache = make_cache(make_layout(name, name, 2, 80, 16), 2, device)
    k, v = torch.randn(3, 2, 80).to(device), torch.randn(3, 2, 16).to(device)
    check_store(k, v, torch.tensor([40, 1, 63]).to(device), cache)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", STORED_NAMES)
def test_special_values(name: str, dtype: torch.dtype, device: torch.device) -> None:
    cache = make_cache(make_layout(name, name, 3, 64), 2, device)
    k, v = (special_rows(6, 3, 64, dtype).to(device) for _ in "kv")
    slots = torch.tensor([5, 6, 32, 33, 62, 63], dtype=torch.int32).to(device)
    q = special_rows(6, 2, 64, dtype).to(device)
    check_store(k, v, slots, cache, q=q, quantize_q=True)


@pytest.mark.parametrize("name", ["nvfp4", FOUR_OVER_SIX])
@pytest.mark.parametrize("g", [1e-20, 1e-6, 3.0517578125e-05, 1.0, 12345.678, 1e20])
def test_global_scales(g: float, name: str, device: torch.device) -> None:
    cache = make_cache(make_layout(name, name, 1, 64), 1, device, k_global=g, v_global=7 * g)
    k, v = (special_rows(8, 1, 64, torch.float32).to(device) for _ in "kv")
    check_store(k, v, torch.arange(8, 16).to(device), cache)


@given(
    bits=np_st.arrays(np.uint32, 64, elements=st.integers(0, 2**32 - 1)),
    spread=st.integers(0, 20),
    name=st.sampled_from(STORED_NAMES),
)
def test_any_float32(
    bits: np.ndarray[Any, Any], spread: int, name: str, device: torch.device
) -> None:
    # A common exponent, give or take `spread`, or else one element would rule the block.
    exponent = (bits[0] >> 23) & 0xFF
    near = np.clip(exponent + ((bits >> 23) & 0xFF) % (spread + 1), 0, 255).astype(np.uint32)
    bits = (bits & np.uint32(0x807FFFFF)) | (near << np.uint32(23))
    k = torch.from_numpy(bits.view(np.float32).copy()).view(1, 1, 64).to(device)
    cache = make_cache(make_layout(name, name, 1, 64), 1, device)
    check_store(k, -k, torch.tensor([3]).to(device), cache)


@given(
    slots=st.lists(st.integers(-3, 95), min_size=1, max_size=6, unique=True),
    wide=st.booleans(),
    name=st.sampled_from(FORMAT_NAMES),
)
def test_any_slots(slots: list[int], wide: bool, name: str, device: torch.device) -> None:
    cache = make_cache(make_layout(name, name, 1, 32), 3, device)
    where = torch.tensor(slots, dtype=torch.int64 if wide else torch.int32, device=device)
    k = torch.randn(len(slots), 1, 32).to(device)
    check_store(k, k + 1, where, cache)


def test_views_of_a_fused_projection(device: torch.device) -> None:
    cache = make_cache(make_layout("mxfp8", "nvfp4", 2, 64), 2, device)
    fused = torch.randn(5, (4 + 2 + 2) * 64).to(torch.bfloat16).to(device)
    q, k, v = (x.unflatten(-1, (-1, 64)) for x in fused.split((4 * 64, 128, 128), dim=-1))
    assert not k.is_contiguous()
    check_store(k, v, torch.arange(30, 35).to(device), cache, q=q, quantize_q=True)


def test_heads_before_tokens(device: torch.device) -> None:
    cache = make_cache(make_layout("kvfp4", "mxfp8", 2, 64), 2, device)
    k, v = (torch.randn(2, 5, 64).to(device).transpose(0, 1) for _ in "kv")
    check_store(k, v, torch.arange(30, 35).to(device), cache)


def test_many_tokens(device: torch.device) -> None:
    cache = make_cache(make_layout("mxfp8", "nvfp4", 1, 32), 10, device)
    k = torch.randn(275, 1, 32).to(device)
    slots = torch.randperm(319)[:275].to(device)
    check_store(k, -2 * k, slots, cache, q=k[:, :, :], quantize_q=True)


def test_more_rows_than_a_narrow_grid_holds(device: torch.device) -> None:
    # 65535 is what grid y and z hold; the interpreter has no such limit and is slow.
    tokens = 65536 * 16 + 5 if device.type == "cuda" else 300
    cache = make_cache(make_layout("kvfp4", "kvfp4", 1, 16), tokens // 32 + 2, device)
    k = torch.randn(tokens, 1, 16, device=device)
    check_store(k, k, torch.arange(1, tokens + 1, device=device), cache)


def test_slots_beyond_the_cache_are_skipped(device: torch.device) -> None:
    cache = make_cache(make_layout("mxfp8", "bf16", 1, 32), 2, device)
    before = clone_cache(cache)
    k = torch.randn(2, 1, 32).to(device)
    store(k, k, torch.tensor([64, 2**40]).to(device), cache)
    assert_same_cache(cache, before)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_no_tokens(name: str, device: torch.device) -> None:
    cache = make_cache(make_layout(name, name, 2, 64), 1, device)
    k = torch.empty(0, 2, 64, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    check_store(k, k, slots, cache, q=k, quantize_q=True)


def test_query_is_given_back(device: torch.device) -> None:
    cache = make_cache(make_layout("bf16", "bf16", 1, 64), 1, device)
    k, q = torch.randn(2, 1, 64).to(device), torch.randn(2, 3, 64).to(device)
    slots = torch.tensor([1, 2]).to(device)
    assert store(k, k, slots, cache) is None
    plain = store(k, k, slots, cache, q=q)
    assert plain is not None
    assert plain.data is q
    assert plain.scale is None


@pytest.mark.parametrize(
    ("k_name", "v_name", "dim", "dtype", "quantize_q"),
    [
        ("mxfp8", "mxfp8", 128, torch.bfloat16, False),
        ("mxfp8", "mxfp8", 64, torch.bfloat16, True),
        ("mxfp8", "nvfp4", 96, torch.float16, False),
        ("nvfp4", "nvfp4", 256, torch.bfloat16, False),
        ("mxfp8", FOUR_OVER_SIX, 128, torch.bfloat16, False),
        ("kvfp4", "kvfp4", 80, torch.float16, False),
        ("mxfp4", "mxfp4", 96, torch.float16, False),
        ("bf16", "bf16", 32, torch.bfloat16, False),
    ],
)
@pytest.mark.parametrize("how", ["center", "rotate", "center+rotate"])
def test_transforms(
    k_name: str,
    v_name: str,
    dim: int,
    dtype: torch.dtype,
    quantize_q: bool,
    how: str,
    device: torch.device,
) -> None:
    """Special values too: every NaN that an addition makes is the same."""
    cache = make_cache(make_layout(k_name, v_name, 2, dim), 2, device)
    center = torch.randn(2, dim).to(device) * 3 if "center" in how else None
    cache = replace(cache, k_center=center, rotates="rotate" in how)
    k, v, q = (special_rows(5, heads, dim, dtype).to(device) for heads in (2, 2, 3))
    slots = torch.tensor([40, 1, 0, 63, 33]).to(device)
    check_store(k, v, slots, cache, q=q, quantize_q=quantize_q)


def test_a_rotated_query_goes_where_it_is_told(device: torch.device) -> None:
    cache = replace(make_cache(make_layout("mxfp8", "mxfp8", 1, 64), 1, device), rotates=True)
    k, q = torch.randn(2, 1, 64).to(device), torch.randn(2, 3, 64).bfloat16().to(device)
    slots, out = torch.tensor([0, 2]).to(device), torch.empty_like(q)
    got = store(k, k, slots, cache, q=q, q_out=Query(out))
    assert got is not None
    assert got.data is out
    assert_same_bits(out, rotate(q).bfloat16(), "q data")
    with pytest.raises(InvalidTensorError, match=r"q_out\.data"):
        store(k, k, slots, cache, q=q, q_out=Query(out[:1]))


def test_query_buffers_are_used(device: torch.device) -> None:
    cache = make_cache(make_layout("mxfp8", "mxfp8", 1, 96), 1, device)
    k, q = torch.randn(2, 1, 96).to(device), torch.randn(2, 3, 96).to(device)
    # A slot of 0 is padding, and its query is still converted.
    slots = torch.tensor([0, 2]).to(device)
    out = Query(
        torch.empty(2, 3, 96, dtype=torch.uint8, device=device),
        torch.empty(2, 3, 3, dtype=torch.uint8, device=device),
    )
    got = store(k, k, slots, cache, q=q, quantize_q=True, q_out=out)
    want = Query.quantize(q)
    assert got is out
    assert_same_bits(out.data, want.data, "q data")
    assert_same_bits(out.scale, want.scale, "q scale")


def test_one_launch(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[object] = []
    kernel = store_module.store_kernel

    class Counting:
        def __getitem__(self, grid: object) -> Any:
            launches.append(grid)
            return kernel[grid]

    monkeypatch.setattr(store_module, "store_kernel", Counting())
    cache = make_cache(make_layout("mxfp8", "nvfp4", 1, 32), 1, device)
    k, q = torch.randn(2, 1, 32).to(device), torch.randn(2, 3, 32).to(device)
    store(k, k, torch.tensor([1, 2]).to(device), cache, q=q, quantize_q=True)
    assert len(launches) == 1


def golden_cases() -> list[str]:
    """Names of the recorded stores."""
    with np.load(GOLDEN) as recorded:
        return sorted({key.split("/")[1] for key in recorded.files if key.startswith("quant_sto")})


@pytest.mark.parametrize("case", golden_cases())
def test_golden_bytes(case: str, device: torch.device) -> None:
    with np.load(GOLDEN) as recorded:
        prefix = f"quant_store/{case}/"
        file = {
            key.removeprefix(prefix): torch.from_numpy(recorded[key])
            for key in recorded.files
            if key.startswith(prefix)
        }
    k, v = (file[x].view(torch.bfloat16).to(device) for x in "kv")
    heads, dim, page = k.shape[1], k.shape[2], int(case.split("p")[-1])
    pages = file["k_cache"].numel() // (page * heads * dim)
    layout = make_layout("mxfp8", "mxfp8", heads, dim, page=page)
    cache = make_cache(layout, pages, device)
    store(k, v, file["loc"].to(device), cache)
    for name, want in (
        ("k_data", file["k_cache"]),
        ("v_data", file["v_cache"]),
        ("k_scale", file["sfk"]),
        ("v_scale", file["sfv"]),
    ):
        got = getattr(cache, name)
        assert_same_bits(got.flatten(), want.view(torch.uint8).flatten(), name)


BAD = {
    "k shape": ({"k": (2, 2, 64)}, r"k: expected shape \(2, 1, 64\)"),
    "v shape": ({"v": (2, 1, 96)}, r"v: expected shape \(2, 1, 64\)"),
    "v tokens": ({"v": (3, 1, 64)}, r"v: expected shape \(2, 1, 64\)"),
    "q shape": ({"q": (2, 3, 32)}, r"q: expected shape \(2, any, 64\)"),
}


@pytest.mark.parametrize("what", BAD)
def test_wrong_shapes(what: str, device: torch.device) -> None:
    changed, message = BAD[what]
    cache = make_cache(make_layout("mxfp8", "mxfp8", 1, 64), 1, device)
    shapes = {"k": (2, 1, 64), "v": (2, 1, 64), "q": (2, 3, 64)} | changed
    tensors = {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}
    with pytest.raises(InvalidTensorError, match=message):
        store(**tensors, slots=torch.zeros(2, dtype=torch.int64, device=device), cache=cache)


def test_wrong_tensors(device: torch.device) -> None:
    cache = make_cache(make_layout("nvfp4", "nvfp4", 1, 80), 1, device)
    k = torch.zeros(4, 1, 80, device=device)
    slots = torch.arange(4, device=device)
    with pytest.raises(InvalidTensorError, match="k: expected last stride 1"):
        store(torch.zeros(4, 1, 160, device=device)[..., ::2], k, slots, cache)
    with pytest.raises(InvalidTensorError, match="v: expected dtype"):
        store(k, k.double(), slots, cache)
    with pytest.raises(InvalidTensorError, match="slots: expected dtype"):
        store(k, k, slots.to(torch.int16), cache)
    with pytest.raises(InvalidTensorError, match="slots: expected shape"):
        store(k, k, slots[None], cache)
    with pytest.raises(InvalidTensorError, match="slots: expected layout contiguous"):
        store(k, k, torch.arange(8, device=device)[::2], cache)
    with pytest.raises(InvalidTensorError, match="k: expected device"):
        store(k.to("meta"), k, slots, cache)
    with pytest.raises(InvalidTensorError, match=r"k: expected type torch\.Tensor, got list"):
        store([1.0], k, slots, cache)  # type: ignore[arg-type]
    with pytest.raises(InvalidTensorError, match="head_dim 80 does not fit mxfp8"):
        store(k, k, slots, cache, q=k, quantize_q=True)
    out = Query(torch.zeros(4, 1, 80, device=device), None)
    with pytest.raises(InvalidTensorError, match="q: expected last size"):
        store(k, k, slots, cache, q=k, quantize_q=True, q_out=out)
