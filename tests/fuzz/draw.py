"""Random models, caches and batches, all from one `random.Random`.

In the tests hypothesis is that source, on a GPU a seed is: the same generators serve both.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch

from inkling_backend.attention import LayerAttention
from inkling_backend.formats import FORMATS, RECIPES, Query
from inkling_backend.formats.layout import PAGE_SIZES, CacheLayout, LayerCache
from inkling_backend.formats.nvfp4 import NVFP4, NVFP4_FOUR_OVER_SIX
from inkling_backend.kernels.configs import SplitRule
from inkling_backend.reference.store import store
from tests.attention.world import World, make_world, slots_of

# One around every tile, page, chunk and split.
EDGES = (32, 64, 128, 192, 256, 512, 768, 1024, 1280, 2048)
SPECIAL = (
    *(float("nan"), -float("nan"), float("inf"), -float("inf")),
    *(3.0e38, -3.3e38, 1e-39, -9e-41, 1.2e-38, 0.0, -0.0),
    *(448.0, 449.0, -464.0, 500.0, 1e4, -65504.0, 65536.0, 6.0, -5.0, 0.25, 1e-30),
)
GARBAGE = (0xFF, 0x7F, 0x80, 0xA5, 0x00, None)


@dataclass(frozen=True)
class Limits:
    """How large cases may be: small where kernels are interpreted.

    tokens: of a request; batch: requests; rows: of one store; head_dim; heads: KV heads.
    """

    tokens: int
    batch: int
    rows: int
    head_dim: int
    heads: int


# An interpreted kernel takes a second for what a GPU does in a microsecond: many small cases.
SMALL = Limits(tokens=140, batch=2, rows=5, head_dim=64, heads=1)
MIDDLE = Limits(tokens=330, batch=4, rows=9, head_dim=128, heads=2)
GPU = Limits(tokens=2100, batch=12, rows=700, head_dim=256, heads=4)


@dataclass
class Tally:
    """What was tried.

    requests: whose outputs or bytes were compared.
    faults: values put in that are not finite or far out of range, and slots of garbage.
    """

    requests: int = 0
    faults: int = 0

    def __iadd__(self, other: Tally) -> Tally:
        self.requests += other.requests
        self.faults += other.faults
        return self


@dataclass(frozen=True)
class Model:
    """What kernels are compiled for; `features` are of `layer`."""

    layout: CacheLayout
    group: int
    dtype: torch.dtype
    quantized: bool
    features: tuple[str, ...]
    chunked: bool

    @property
    def q_heads(self) -> int:
        return self.group * self.layout.num_kv_heads


def draw_model(rng: random.Random, limits: Limits) -> Model:
    """A recipe, or any two formats; any head sizes that they take."""
    if rng.random() < 0.7:
        recipe = rng.choice(list(RECIPES.values()))
        k, v = recipe.k, recipe.v
    else:
        k, v = rng.choice(list(FORMATS.values())), rng.choice(list(FORMATS.values()))
    if rng.random() < 0.5:
        # Readers do not know, and worlds are filled by the plain rule: only the store does.
        k, v = (NVFP4_FOUR_OVER_SIX if side is NVFP4 else side for side in (k, v))

    def head_dim(block: int) -> int:
        usual = [n for n in (64, 128, 256) if n <= limits.head_dim]
        if rng.random() < 0.6:
            return rng.choice(usual)
        return (block or 16) * rng.randint(1, limits.head_dim // (block or 16))

    k_dim = head_dim(k.block)
    v_dim = k_dim if k_dim % (v.block or 16) == 0 and rng.random() < 0.7 else head_dim(v.block)
    heads = rng.randint(1, limits.heads)
    sinks = rng.choice((0, 0, 1, 2, 4, 8)) if k.block and v.block else 0
    layout = CacheLayout(k, v, heads, k_dim, v_dim, rng.choice(PAGE_SIZES), sinks)
    features = [name for name in ("window", "softcap", "sinks") if rng.random() < 0.3]
    return Model(
        layout,
        group=rng.choice((1, 1, 2, 3, 4, 7, 8)),
        dtype=rng.choice((torch.bfloat16, torch.bfloat16, torch.float16)),
        quantized=k_dim % 32 == 0 and rng.random() < 0.4,
        features=tuple(features),
        chunked=rng.random() < 0.5,
    )


def draw_length(rng: random.Random, most: int) -> int:
    """At, one below or above an edge; or any."""
    if rng.random() < 0.6:
        edges = [n for n in EDGES if n < most]
        return rng.choice(edges) + rng.randint(-1, 1) if edges else 1
    return rng.choice((0, 1, 2, rng.randint(0, most)))


def draw_layer(
    rng: random.Random, model: Model, length: int, device: torch.device
) -> LayerAttention:
    """Values of the model's features; a window's edge may fall anywhere up to ``length``."""
    layer = LayerAttention(rng.choice((0.125, 0.088, 1.0, 0.01)))
    if "window" in model.features:
        window = rng.choice((0, 1, 31, 63, 64, 65, rng.randint(0, length + 2)))
        layer = replace(layer, window=window)
    if "softcap" in model.features:
        layer = replace(layer, softcap=rng.choice((0.5, 2.0, 30.0, 1e4)))
    if "sinks" in model.features:
        sinks = torch.randn(model.q_heads) * rng.choice((1.0, 5.0, 100.0))
        if rng.random() < 0.2:
            bad = (torch.nan, torch.inf, -torch.inf, 3e38)
            sinks[rng.randrange(model.q_heads)] = rng.choice(bad)
        dtype = rng.choice((torch.float32, torch.bfloat16, torch.float16))
        layer = replace(layer, sinks=sinks.to(dtype).to(device))
    return layer


def draw_rows(
    rng: random.Random, shape: tuple[int, ...], tally: Tally, wild: bool = True
) -> torch.Tensor:
    """float32 rows ``[..., D]`` in one of the manners in which models are hard to quantize.

    Args:
        wild: whether values may be far out of range, or not finite.
    """
    x = torch.randn(shape)
    manner = rng.choice(("plain", "plain", "spread", "offset", "size"))
    if manner == "spread":
        x *= torch.exp2(torch.randint(-14, 15, (*shape[:-1], 1)))
    elif manner == "offset":  # as models with a bias of K have it
        x += 300.0 * torch.randn(shape[-1])
    elif manner == "size" and wild:
        x *= rng.choice((1e-39, 1e-30, 1e-9, 1e-4, 1e4, 1e9, 1e18, 1e30))
        tally.faults += 1
    count = min(x.numel(), rng.choice((0, 0, 1, 3, 9))) if wild else 0
    if count:
        values = torch.tensor([rng.choice(SPECIAL) for _ in range(count)])
        x.view(-1)[torch.randperm(x.numel())[:count]] = values
        tally.faults += count
    return x


def strided(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The same ``[T, H, D]`` with other strides, or off alignment; NaN lies between the rows."""
    tokens, heads, dim = x.shape
    manner = rng.choice(("dense", "heads first", "wide", "offset", "gaps"))
    if manner == "heads first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if manner == "wide":
        wide = x.new_full((tokens, heads, dim + rng.choice((1, 3, 16))), torch.nan)
        wide[..., :dim] = x
        return wide[..., :dim]
    if manner == "offset":
        flat = x.new_full((x.numel() + 3,), torch.nan)
        flat[3:] = x.flatten()
        return flat[3:].view(x.shape)
    if manner == "gaps":
        gaps = x.new_full((2 * tokens, heads, dim), torch.nan)
        gaps[::2] = x
        return gaps[::2]
    return x


def fill(cache: LayerCache, byte: int | None) -> None:
    """Every byte of a cache; random ones for None."""
    buffers = (
        cache.k_data,
        cache.v_data,
        cache.k_scale,
        cache.v_scale,
        cache.k_first,
        cache.v_first,
    )
    for buffer in buffers:
        if buffer is not None:
            raw = buffer.view(torch.uint8)
            raw.random_(0, 256) if byte is None else raw.fill_(byte)


def refill_dead(world: World, byte: int | None) -> int:
    """Other garbage in every slot that no request holds; how many slots those are."""
    live = torch.cat([slots_of(world, b) for b in range(len(world.lens))] or [torch.tensor([])])
    dead = torch.ones(world.cache.k_data.shape[0], dtype=torch.bool)
    dead[live.long().cpu()] = False
    dead[0] = False
    slots = dead.nonzero()[:, 0].to(world.device)
    layout, cache = world.layout, world.cache
    for side, data, scale in (
        (layout.k, cache.k_data, cache.k_scale),
        (layout.v, cache.v_data, cache.v_scale),
    ):
        raw = data.view(torch.uint8)
        rows = raw[slots]
        raw[slots] = rows.random_(0, 256) if byte is None else rows.fill_(byte)
        if scale is not None:
            where = layout.scale_offsets(side, slots)
            new = torch.randint(0, 256, where.shape, dtype=torch.uint8) if byte is None else byte
            flat = scale.view(-1)
            flat[where] = new.to(flat.device) if isinstance(new, torch.Tensor) else new
    _refill_dead_sinks(world, byte)
    return len(slots)


def _refill_dead_sinks(world: World, byte: int | None) -> None:
    """The same in every row of sink tokens that is not one of a request's first page."""
    layout = world.layout
    for rows in (world.cache.k_first, world.cache.v_first):
        if rows is None:
            continue
        held = []
        for b, length in enumerate(world.lens):
            if length:
                page = int(slots_of(world, b)[0]) // layout.page_size
                held.append((page, slice(0, min(length, layout.sink_tokens))))
        kept = [rows[where].clone() for where in held]
        raw = rows.view(torch.uint8)
        raw.random_(0, 256) if byte is None else raw.fill_(byte)
        for where, values in zip(held, kept, strict=True):
            rows[where] = values


def draw_world(
    rng: random.Random, model: Model, lens: list[int], device: torch.device, tally: Tally
) -> World:
    """Requests of these lengths in shuffled pages of a cache of garbage."""
    layout = model.layout
    world = make_world(
        lens,
        device,
        k=layout.k_format.name,
        v=layout.v_format.name,
        kv_heads=layout.num_kv_heads,
        group=model.group,
        k_dim=layout.k_head_dim,
        v_dim=layout.v_head_dim,
        page=layout.page_size,
        dtype=model.dtype,
        # Two sizes alone: kernels are compiled for each.
        max_context=512 if max(lens, default=0) <= 512 else 4096,
        sink_tokens=layout.sink_tokens,
    )
    fill(world.cache, rng.choice(GARBAGE))
    for scale in (world.cache.k_global, world.cache.v_global):
        if scale is not None:
            scale.fill_(rng.choice((1.0, 0.013, 3e-5, 700.0)))
    for b, length in enumerate(lens):
        wild = rng.random() < 0.4
        heads = layout.num_kv_heads
        k = draw_rows(rng, (length, heads, layout.k_head_dim), tally, wild)
        v = draw_rows(rng, (length, heads, layout.v_head_dim), tally, wild)
        store(k.to(device), v.to(device), slots_of(world, b), world.cache)
    return world


def draw_query(
    rng: random.Random, model: Model, rows: int, device: torch.device, tally: Tally
) -> Query:
    """``[rows, query heads, Dk]``."""
    shape = (rows, model.q_heads, model.layout.k_head_dim)
    q = draw_rows(rng, shape, tally, rng.random() < 0.3).to(model.dtype).to(device)
    if model.quantized:
        return Query.quantize(q)
    if rng.random() < 0.5:  # as the engine has it: beside K and V in the output of one product
        wide = q.new_full((rows, model.q_heads + rng.randint(1, 3), shape[2]), torch.nan)
        first = rng.choice((0, wide.shape[1] - model.q_heads))
        q = wide[:, first : first + model.q_heads].copy_(q)
    return Query(q)


def draw_transform(rng: random.Random, cache: LayerCache) -> LayerCache:
    """The same cache with keys under a transform, or not."""
    center = None
    if rng.random() < 0.3:
        shape = (cache.layout.num_kv_heads, cache.layout.k_head_dim)
        size = rng.choice((0.0, 1.0, 300.0, 1e18))
        center = (size * torch.randn(shape)).to(cache.k_data.device)
    return replace(cache, k_center=center, rotates=rng.random() < 0.3)


def draw_rule(rng: random.Random, chunked: bool, batch: int) -> SplitRule:
    """A rule that cuts small requests, too; splits are some chunks if ``chunked``."""
    if chunked:
        chunks, heads = rng.choice((0, 7, 100)), rng.choice((1, 8))
        tokens, programs = rng.choice((256, 384, 1024)), rng.choice((1, 7, 30, 1 << 20))
        return SplitRule(tokens, tokens, 1, 128, 100, chunks, heads, programs)
    least = rng.choice((64, 128, 256))
    most_items = rng.choice((100, batch + 3))
    return SplitRule(least, rng.choice((least, 512)), rng.choice((1, 4)), 64, most_items)
