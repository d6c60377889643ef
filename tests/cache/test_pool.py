"""The buffers of a model's cache: sizes, copies that keep scales, exports."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.cache import KVCachePool
from inkling_backend.errors import InvalidTensorError, UnsupportedError
from inkling_backend.formats import get_format, get_recipe
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.reference.gather import gather

PAIRS = [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("kvfp4", "bf16"), ("bf16", "mxfp8")]


def make_pool(k: str, v: str, page: int = 64, pages: int = 4) -> KVCachePool:
    layout = CacheLayout(get_format(k), get_format(v), 2, 64, 96, page)
    return KVCachePool(layout, 3, pages, "cpu")


def fill(pool: KVCachePool) -> None:
    """Random finite contents."""
    for buffer in pool.buffers():
        if buffer.tensor.dtype == torch.bfloat16:
            buffer.tensor.normal_()
        else:
            buffer.tensor.random_(0, 0x7E)


def rows(pool: KVCachePool, slots: list[int]) -> list[torch.Tensor]:
    """What the tokens of these slots decode to, in every layer."""
    index = torch.tensor(slots)
    return [
        gather(index, pool.layer(i), side, torch.float32)
        for i in range(pool.num_layers)
        for side in ("k", "v")
    ]


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_bytes_are_what_the_layout_says(k: str, v: str) -> None:
    pool = make_pool(k, v)
    slots = 4 * 64
    global_scales = 3 * 4 * sum(get_format(name).has_global_scale for name in (k, v))
    assert pool.num_slots == slots
    assert pool.nbytes == pool.layout.bytes_per_token * 3 * slots + global_scales
    assert not any(b.tensor.any() for b in pool.buffers() if b.name.endswith("data"))
    assert sum(b.bytes_per_page for b in pool.buffers()) * 4 == pool.nbytes - global_scales
    for buffer in pool.buffers():
        assert buffer.bytes_per_page * 4 == buffer.tensor.nbytes
        assert buffer.tensor.is_contiguous()


def test_centers_are_counted_and_start_at_zero() -> None:
    plain = make_pool("mxfp8", "nvfp4")
    pool = KVCachePool(plain.layout, 3, 4, "cpu", centers=True, rotates=True)
    assert plain.k_center is None
    assert pool.k_center is not None
    assert pool.nbytes == plain.nbytes + 3 * 2 * 64 * 4
    assert not pool.k_center.any()
    assert pool.layer(2).rotates
    assert not plain.layer(2).rotates
    center = pool.layer(2).k_center
    assert center is not None
    center.fill_(7.0)
    assert pool.k_center[2].eq(7.0).all()


def sink_pool(pages: int = 4) -> KVCachePool:
    recipe = get_recipe("nvfp4")
    layout = CacheLayout(recipe.k, recipe.v, 2, 64, 96, 64, sink_tokens=3)
    others = {1: layout.with_recipe(get_recipe("bf16")), 2: layout.with_recipe(get_recipe("mxfp8"))}
    return KVCachePool(layout, 3, pages, "cpu", others=others)


def test_sink_tokens_are_counted() -> None:
    pool, plain = sink_pool(), make_pool("nvfp4", "nvfp4")
    assert [layout.sink_tokens for layout in pool.layouts] == [3, 0, 3]
    # 3 tokens of 2 heads of 64 + 96 elements, a page: 30 bytes for each of its 64 tokens.
    assert pool.layout.bytes_per_token == plain.layout.bytes_per_token + 30
    assert pool.nbytes == pool.bytes_per_token * pool.num_slots + 2 * 3 * 4
    assert pool.layer(1).k_first is None
    uneven = CacheLayout(get_format("nvfp4"), get_format("nvfp4"), 1, 80, 80, sink_tokens=1)
    assert uneven.bytes_per_token == 1 * 2 * 45 + 3  # of 2.5


def test_pages_take_their_sink_tokens_along() -> None:
    pool, target = sink_pool(), sink_pool(6)
    fill(pool)
    target.copy_pages([5], pool, [2])
    for i, side in ((0, "k_first"), (0, "v_first"), (2, "k_first"), (2, "v_first")):
        there, here = getattr(target.layer(i), side), getattr(pool.layer(i), side)
        assert torch.equal(there[5], here[2])
        assert not there[:5].any()
    parts = [buffer.name for buffer in pool.transfers()]
    assert len(parts) == 2 * (3 + 1 + 3)
    assert all(".k_" in name for name in parts[:7])


def test_single_tokens_have_no_sink_rows() -> None:
    pool, slots = sink_pool(), torch.tensor([3])
    with pytest.raises(UnsupportedError, match="pages with sink tokens"):
        pool.copy_slots(slots, slots)
    with pytest.raises(UnsupportedError, match="pages with sink tokens"):
        pool.export_slots(slots)
    with pytest.raises(UnsupportedError, match="pages with sink tokens"):
        pool.import_slots(slots, [])


def test_layouts_that_cannot_have_sink_tokens() -> None:
    formats = get_format("nvfp4"), get_format("nvfp4")
    with pytest.raises(UnsupportedError, match="9 sink tokens are asked for: 0 to 8"):
        CacheLayout(*formats, 2, 64, 64, sink_tokens=9)
    with pytest.raises(UnsupportedError, match="kept in BF16, which this cache is in"):
        CacheLayout(get_format("bf16"), get_format("nvfp4"), 2, 64, 64, sink_tokens=1)


def test_buffers_are_named_by_layer_and_part() -> None:
    names = [buffer.name for buffer in make_pool("mxfp8", "bf16").buffers()]
    assert names == [
        f"layer{i}.{part}" for i in range(3) for part in ("k_data", "k_scale", "v_data")
    ]


def test_global_scales_are_one_and_seen_in_place() -> None:
    pool = make_pool("nvfp4", "mxfp8")
    assert pool.v_global is None
    assert pool.k_global is not None
    assert pool.k_global.tolist() == [1.0, 1.0, 1.0]
    pool.k_global[1] = 0.5
    assert [pool.layer(i).k_global.item() for i in range(3)] == [1.0, 0.5, 1.0]  # type: ignore[union-attr]
    assert pool.layer(1).v_global is None


@pytest.mark.parametrize("name", ["mxfp8", "kvfp4", "nvfp4", "mxfp4"])
def test_an_empty_pool_holds_zeros_with_a_scale_of_one(name: str) -> None:
    pool = make_pool(name, name)
    cache = pool.layer(0)
    assert not cache.k_data.any()
    cache.k_data.fill_(0x38 if name == "mxfp8" else 0x22)  # codes of 1.0
    assert (gather(torch.arange(1, 11), cache, "k", torch.float32) == 1.0).all()


def test_what_grows_with_the_pool_comes_from_the_given_allocator() -> None:
    """And nothing else: what it gives may lose its contents while the server sleeps."""
    made: list[torch.Tensor] = []

    def allocate(shape: tuple[int, ...], **options: object) -> torch.Tensor:
        made.append(torch.zeros(shape, **options))  # type: ignore[call-overload]
        return made[-1]

    layout = CacheLayout(get_format("nvfp4"), get_format("mxfp8"), 2, 64, 64, 64)
    pool = KVCachePool(layout, 2, 3, "cpu", allocate)
    assert {id(tensor) for tensor in made} == {id(each.tensor) for each in pool.buffers()}
    for tensor in made:
        tensor.fill_(0xFF)
    assert pool.k_global is not None
    assert pool.k_global.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("page", [32, 64, 128])
@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_copies_take_scales_along(k: str, v: str, page: int) -> None:
    pool = make_pool(k, v, page)
    fill(pool)
    before = [b.tensor.clone() for b in pool.buffers()]
    src, dst = [1, page + 3, 2 * page + 31], [2 * page + 1, 5, 3 * page]
    wanted = rows(pool, src)
    others = [s for s in range(pool.num_slots) if s not in dst]
    kept = rows(pool, others)
    pool.copy_slots(torch.tensor(dst), torch.tensor(src))
    assert all(torch.equal(a, b) for a, b in zip(rows(pool, dst), wanted, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(rows(pool, others), kept, strict=True))
    assert not all(torch.equal(a, b.tensor) for a, b in zip(before, pool.buffers(), strict=True))


def test_overlapping_copies_read_first() -> None:
    pool = make_pool("mxfp8", "nvfp4")
    fill(pool)
    wanted = rows(pool, [1, 2, 3])
    pool.copy_slots(torch.tensor([2, 3, 1], dtype=torch.int32), torch.tensor([1, 2, 3]))
    assert all(torch.equal(a, b) for a, b in zip(rows(pool, [2, 3, 1]), wanted, strict=True))


def test_the_padding_slot_is_never_written() -> None:
    pool = make_pool("mxfp8", "kvfp4")
    fill(pool)
    before = [b.tensor.clone() for b in pool.buffers()]
    pool.copy_slots(torch.tensor([0, -1, 0]), torch.tensor([7, 8, 9]))
    assert all(torch.equal(a, b.tensor) for a, b in zip(before, pool.buffers(), strict=True))


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_export_and_import_round_trip(k: str, v: str) -> None:
    pool = make_pool(k, v)
    fill(pool)
    saved = pool.export_slots(torch.tensor([3, 200, 65]))
    wanted = rows(pool, [3, 200, 65])
    assert saved[0].k.data.shape == (3, 2, pool.layout.k.row_items)
    assert (saved[0].v.scale is None) == (get_format(v).block == 0)
    other = make_pool(k, v)
    other.import_slots(torch.tensor([9, 70, 100]), saved)
    assert all(torch.equal(a, b) for a, b in zip(rows(other, [9, 70, 100]), wanted, strict=True))
    assert other.export_slots(torch.tensor([8]))[2].k.data.count_nonzero() == 0


def contents(pool: KVCachePool) -> list[torch.Tensor]:
    """Bytes of every buffer, ``[pages, bytes of a page]``."""
    return [each.tensor.view(pool.num_pages, -1).view(torch.uint8) for each in pool.buffers()]


@pytest.mark.parametrize("page", [32, 128])
@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_pages_make_a_round_trip_with_their_scales(k: str, v: str, page: int) -> None:
    """To a pool of another size, as the host tier has one, and back into other pages."""
    device, host = make_pool(k, v, page, pages=7), make_pool(k, v, page, pages=9)
    fill(device)
    before = [each.clone() for each in contents(device)]
    host.copy_pages([8, 2, 3, 4], device, [1, 4, 5, 6])
    for tensor in contents(device):
        tensor.fill_(0xFF)
    device.copy_pages([1, 2, 3, 6], host, [3, 4, 8, 2])
    for was, now in zip(before, contents(device), strict=True):
        assert torch.equal(now[[1, 2, 3, 6]], was[[5, 6, 1, 4]])
        assert (now[[0, 4, 5]] == 0xFF).all()


def test_pages_of_one_layer_are_copied_alone() -> None:
    source, target = make_pool("mxfp8", "nvfp4"), make_pool("mxfp8", "nvfp4")
    fill(source)
    before = [each.clone() for each in contents(target)]
    target.copy_pages([2], source, [3], layers=[1])
    for name, was, now, origin in zip(
        [each.name for each in target.buffers()],
        before,
        contents(target),
        contents(source),
        strict=True,
    ):
        if name.startswith("layer1."):
            assert torch.equal(now[2], origin[3])
            was[2] = origin[3]
        assert torch.equal(now, was)


def test_wrong_copies_of_pages_are_refused() -> None:
    pool = make_pool("mxfp8", "mxfp8")
    with pytest.raises(InvalidTensorError, match="pages"):
        pool.copy_pages([1, 2], make_pool("mxfp8", "mxfp8"), [1])
    with pytest.raises(InvalidTensorError, match="source"):
        pool.copy_pages([1], make_pool("mxfp8", "mxfp8", page=32), [1])


def test_wrong_copies_are_refused() -> None:
    pool = make_pool("mxfp8", "mxfp8")
    with pytest.raises(InvalidTensorError, match="src"):
        pool.copy_slots(torch.tensor([1, 2]), torch.tensor([1]))
    saved = pool.export_slots(torch.tensor([1, 2]))
    with pytest.raises(InvalidTensorError, match="rows"):
        pool.import_slots(torch.tensor([1]), saved)
    with pytest.raises(InvalidTensorError, match="rows"):
        pool.import_slots(torch.tensor([1, 2]), saved[:2])


def mixed_pool(*names: str, pages: int = 4) -> KVCachePool:
    """A layer for each recipe."""
    recipes = [get_recipe(name) for name in names]
    layout = CacheLayout(recipes[0].k, recipes[0].v, 2, 64, 96, 64)
    others = {i: layout.with_recipe(recipe) for i, recipe in enumerate(recipes)}
    return KVCachePool(layout, len(names), pages, "cpu", others=others)


def test_layers_have_layouts_of_their_own() -> None:
    names = ("nvfp4", "mxfp8", "bf16", "mxfp8-nvfp4")
    pool = mixed_pool(*names)
    each = [make_pool(r.k.name, r.v.name).layout for r in map(get_recipe, names)]
    assert pool.layouts == tuple(each)
    assert pool.bytes_per_token == sum(layout.bytes_per_token for layout in each)
    # Of both sides every layer has an entry, whatever its format.
    assert pool.nbytes == pool.bytes_per_token * pool.num_slots + 2 * 4 * 4
    assert [pool.layer(i).k_global is None for i in range(4)] == [False, True, True, True]
    assert [pool.layer(i).v_global is None for i in range(4)] == [False, True, True, False]

    fill(pool)
    src, dst = [1, 64 + 3, 127], [130, 5, 200]
    wanted = rows(pool, src)
    exported = pool.export_slots(torch.tensor(src))
    pool.copy_slots(torch.tensor(dst), torch.tensor(src))
    assert all(torch.equal(a, b) for a, b in zip(rows(pool, dst), wanted, strict=True))
    target = mixed_pool(*names)
    target.import_slots(torch.tensor(dst), exported)
    assert all(torch.equal(a, b) for a, b in zip(rows(target, dst), wanted, strict=True))
    target = mixed_pool(*names, pages=6)
    target.copy_pages([4, 5], pool, [0, 1])
    there = rows(target, [4 * 64 + slot for slot in src])
    assert all(torch.equal(a, b) for a, b in zip(there, wanted, strict=True))
    parts = [buffer.name for buffer in pool.transfers()]
    assert len(parts) == 2 * (4 + 3)
    assert all(".k_" in name for name in parts[:7])


def test_pages_go_to_layers_of_the_same_layouts_alone() -> None:
    with pytest.raises(InvalidTensorError, match="source"):
        mixed_pool("nvfp4", "mxfp8").copy_pages([1], mixed_pool("nvfp4", "nvfp4"), [1])
