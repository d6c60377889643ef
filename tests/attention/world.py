"""A small paged cache full of poison with some requests in it, and what attention over it is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, LayerAttention
from inkling_backend.cache import KVCachePool
from inkling_backend.formats import Query, get_format
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.reference.gather import gather
from inkling_backend.reference.store import store

# In slot tables where no token is: a slot that is in no pool.
NOWHERE = 1 << 30

PLAIN = LayerAttention(0.125)


@dataclass
class World:
    """Requests in a cache.

    Attributes:
        slot_table: ``[rows, max_context]`` int32; request b has row ``rows[b]``.
        lens: tokens of each request, all stored.
        query: ``[B or T, Hq, Dk]`` as attention reads it.
    """

    layout: CacheLayout
    group: int
    dtype: torch.dtype
    cache: LayerCache
    slot_table: torch.Tensor
    rows: torch.Tensor
    lens: list[int]
    max_context: int

    @property
    def device(self) -> torch.device:
        return self.cache.k_data.device

    @property
    def num_q_heads(self) -> int:
        return self.group * self.layout.num_kv_heads

    @property
    def seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lens, dtype=torch.int64, device=self.device)

    @property
    def page_table(self) -> torch.Tensor:
        """Of every request, by position; what is beyond its length is nonsense."""
        first = self.slot_table[self.rows, :: self.layout.page_size]
        return (first // self.layout.page_size).to(torch.int32)

    def queries(self, num: int, *, quantized: bool = False, scale: float = 1.0) -> Query:
        shape = (num, self.num_q_heads, self.layout.k_head_dim)
        q = (torch.randn(shape) * scale).to(self.dtype).to(self.device)
        return Query.quantize(q) if quantized else Query(q)

    def empty_out(self, num: int) -> torch.Tensor:
        shape = (num, self.num_q_heads, self.layout.v_head_dim)
        return torch.full(shape, torch.nan, dtype=self.dtype, device=self.device)

    def runner(
        self,
        *,
        max_batch: int = 16,
        quantize_query: bool = False,
        max_q_len: int = 1,
        relative_bias: bool = False,
    ) -> AttentionRunner:
        model = (self.num_q_heads, self.layout, self.dtype, quantize_query)
        spec = AttentionSpec(*model, relative_bias=relative_bias)
        return AttentionRunner(
            spec,
            max_batch=max_batch,
            max_context=self.max_context,
            max_tokens=self.cache.num_pages * self.layout.page_size,
            max_q_len=max_q_len,
            device=self.device,
        )


def make_world(
    lens: list[int],
    device: torch.device,
    *,
    k: str = "bf16",
    v: str | None = None,
    kv_heads: int = 2,
    group: int = 2,
    k_dim: int = 64,
    v_dim: int | None = None,
    page: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    max_context: int = 1024,
    k_scale: float = 1.0,
    sink_tokens: int = 0,
) -> World:
    """Stores random tokens in shuffled pages; every other byte of the cache decodes to NaN."""
    v = v or k
    formats = get_format(k), get_format(v)
    layout = CacheLayout(*formats, kv_heads, k_dim, v_dim or k_dim, page, sink_tokens)
    num_pages = 1 + sum(-(-n // page) for n in lens) + 2
    pool = KVCachePool(layout, 1, num_pages, device)
    cache = pool.layer(0)
    for buffer in pool.buffers():
        buffer.tensor.view(torch.uint8).fill_(0xFF)
    if pool.k_global is not None:
        pool.k_global.fill_(0.013)
    if pool.v_global is not None:
        pool.v_global.fill_(0.021)
    pages = (torch.randperm(num_pages - 1) + 1).tolist()
    table = torch.full((len(lens) + 3, max_context), NOWHERE, dtype=torch.int32)
    rows = torch.randperm(len(lens) + 2)[: len(lens)] + 1
    table[0, 0] = 0
    for row, length in zip(rows.tolist(), lens, strict=True):
        for start in range(0, length, page):
            stop = min(start + page, length)
            table[row, start:stop] = pages.pop() * page + torch.arange(stop - start)
    world = World(layout, group, dtype, cache, table.to(device), rows.to(device), lens, max_context)
    for b in range(len(lens)):
        slots = slots_of(world, b)
        keys = torch.randn(len(slots), kv_heads, layout.k_head_dim) * k_scale
        values = torch.randn(len(slots), kv_heads, layout.v_head_dim)
        store(keys.to(device), values.to(device), slots, cache)
    return world


def slots_of(world: World, request: int) -> torch.Tensor:
    """``[length]`` slots of a request."""
    return world.slot_table[world.rows[request], : world.lens[request]].long()


def rows_of(world: World, slots: torch.Tensor, side: str) -> torch.Tensor:
    """What a request's tokens are read as, ``[length, kv heads, D]`` float32."""
    cache, page = world.cache, world.layout.page_size
    rows = gather(slots, cache, side, torch.float32)
    first, scale = getattr(cache, f"{side}_first"), getattr(cache, f"{side}_global")
    for position in range(min(world.layout.sink_tokens, len(slots))):
        kept = first[slots[position] // page, position].float()
        rows[position] = kept if scale is None else kept * scale
    return rows


def attend_exactly(
    world: World,
    request: int,
    q: torch.Tensor,
    layer: LayerAttention = PLAIN,
    *,
    tree: torch.Tensor | None = None,
    like_kernel: bool = False,
) -> torch.Tensor:
    """Attention of the last rows of one request.

    Args:
        q: ``[n, Hq, Dk]``, dequantized.
        layer: a bias of it is that of these rows.
        tree: ``[n]``, as in `AttentionRunner.plan_decode`.
        like_kernel: not exactly, but with the roundings that a kernel may make: float32 logits
            and sums, probabilities and the result in 16 bits.

    Returns:
        ``[n, Hq, Dv]`` float64.
    """
    real = torch.float32 if like_kernel else torch.float64
    slots = slots_of(world, request)
    n, length = q.shape[0], len(slots)
    if length == 0:
        return torch.zeros(n, world.num_q_heads, world.layout.v_head_dim, dtype=torch.float64)
    k, v = (rows_of(world, slots, side).cpu().to(real) for side in ("k", "v"))
    k, v = (x.repeat_interleave(world.group, dim=1) for x in (k, v))
    logits = torch.einsum("nhd,thd->hnt", q.cpu().to(real), k) * layer.sm_scale
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    distance = (torch.arange(n) + length - n)[:, None] - torch.arange(length)
    if layer.bias is not None:
        table = torch.zeros(world.num_q_heads, n, length, dtype=real)
        row, key = ((distance >= 0) & (distance < layer.bias.shape[2])).nonzero(as_tuple=True)
        table[:, row, key] = layer.bias.cpu().to(real)[row, :, distance[row, key]].T
        logits = logits + table
    hidden = distance < 0 if layer.causal else distance < -length
    if tree is not None:
        new = torch.arange(length) - (length - n)
        hidden = (new >= 0) & ((tree.cpu()[:, None] >> new.clamp(min=0) & 1) == 0)
    if layer.window is not None:
        hidden |= distance > layer.window
    logits = logits.masked_fill(hidden, -torch.inf)
    top = logits.amax(-1, keepdim=True)
    if layer.sinks is not None:
        sinks = layer.sinks.cpu().to(real)[:, None, None]
        top = torch.maximum(top, sinks)
    p = torch.exp(logits - top)
    total = p.sum(-1)  # [Hq, n]
    if layer.sinks is not None:
        total = total + torch.exp(sinks - top)[..., 0]
    if like_kernel:
        p = p.bfloat16().float()
    out = torch.einsum("hnt,thd->nhd", p, v) / total.T[:, :, None]
    return (out.to(world.dtype) if like_kernel else out).double()


def assert_as_accurate(
    got: torch.Tensor,
    world: World,
    request: int,
    q: torch.Tensor,
    layer: LayerAttention = PLAIN,
    tree: torch.Tensor | None = None,
) -> None:
    """At most twice the error of a same-precision run, plus half a unit of the largest output."""
    exact = attend_exactly(world, request, q, layer, tree=tree)
    rounded = attend_exactly(world, request, q, layer, tree=tree, like_kernel=True)
    allowed = 2 * (rounded - exact).abs().max()
    allowed += torch.finfo(world.dtype).eps / 2 * exact.abs().max()
    error = (got.cpu().double() - exact).abs().max()
    assert error <= allowed, f"request {request}: error {error:.3g}, allowed {allowed:.3g}"


def strided(query: Query) -> Query:
    """The same rows among others, as a slice of a fused projection has them; NaN between them."""
    if query.scale is not None:
        return query
    tokens, heads, dim = query.data.shape
    wide = query.data.new_full((tokens, (heads + 1) * dim + 16), torch.nan)
    rows = wide[:, 16 : 16 + heads * dim].view(tokens, heads, dim)
    return Query(rows.copy_(query.data))
