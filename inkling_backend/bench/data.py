"""Random requests in random pages, and pools full of random tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, LayerAttention
from inkling_backend.bench.cases import Case, Heads, parse_recipe
from inkling_backend.cache import KVCachePool
from inkling_backend.env import Extend
from inkling_backend.formats import Recipe

# Bytes that a captured graph reads before it comes back to the first: far more than any L2 cache.
ROTATE_BYTES = 1_200_000_000
# A graph walks at least so many layers, that its start counts for little, and at most so many.
FEWEST_LAYERS, MOST_LAYERS = 4, 2048
# Share of the free memory that one operation's layers may take.
MEMORY_SHARE = 0.4
# What a server has, whatever the shape: the split rule and the kernels' constants depend on these.
MAX_BATCH, MAX_CONTEXT = 256, 131072
# NVFP4's scales then lie in the middle of E4M3's range for normally distributed numbers.
GLOBAL_SCALE = 1 / 256
_CHUNK = 65536
# Slots of a pool into which few tokens are stored, so that they land far apart; and as a store of
# few tokens takes microseconds, it walks more layers than attention does.
STORE_SLOTS, STORE_LAYERS = 16384, 32


@dataclass(frozen=True)
class Batch:
    """Requests of a case, on the device; their tokens lie in random pages.

    Attributes:
        lens: tokens of each request, on the host.
        new_tokens: query rows of each request.
        num_pages: pages that the pool needs, page 0 included.
        slot_table: ``[B, columns]`` int32, position -> slot; 0 beyond a request's pages.
        page_table: ``[B, most pages]`` int32; 0 beyond a request's pages.
        rows: ``[B]`` int32, each request's row of ``slot_table``.
        seq_lens: ``[B]`` int32.
        qo_indptr: ``[B + 1]`` int32.
        new_slots: ``[B * new_tokens]`` int64, where the newest tokens lie.
    """

    lens: tuple[int, ...]
    new_tokens: int
    num_pages: int
    slot_table: torch.Tensor
    page_table: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    qo_indptr: torch.Tensor
    new_slots: torch.Tensor


def make_batch(case: Case, columns: int, device: torch.device) -> Batch:
    """Requests of a case.

    Args:
        columns: of the slot table; no fewer than the longest request needs are made.
    """
    page, lens = case.heads.page_size, case.lengths
    batch = len(lens)
    seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
    counts = (seq_lens.long() + page - 1) // page
    most, total = -(-max(lens) // page), sum(-(-length // page) for length in lens)
    page_table = torch.zeros(batch, most, dtype=torch.int32, device=device)
    used = torch.arange(most, device=device) < counts[:, None]
    page_table[used] = (torch.randperm(total, device=device) + 1).to(torch.int32)

    slot_table = torch.zeros(batch, max(columns, most * page), dtype=torch.int32, device=device)
    offsets = torch.arange(page, dtype=torch.int32, device=device)
    slots = page_table[:, :, None] * page + offsets
    slot_table[:, : most * page] = torch.where(used[:, :, None], slots, 0).flatten(1)

    rows = torch.arange(batch, dtype=torch.int32, device=device)
    back = torch.arange(case.new_tokens, 0, -1, device=device)
    new_slots = slot_table.gather(1, seq_lens.long()[:, None] - back).flatten().long()
    qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=device) * case.new_tokens
    return Batch(
        lens=lens,
        new_tokens=case.new_tokens,
        num_pages=total + 1,
        slot_table=slot_table,
        page_table=page_table,
        rows=rows,
        seq_lens=seq_lens,
        qo_indptr=qo_indptr,
        new_slots=new_slots,
    )


def randn(*shape: int, device: torch.device) -> torch.Tensor:
    """Normally distributed bfloat16 numbers."""
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


class Lab:
    """What the operations of one run share: the model, the device and its runners."""

    def __init__(
        self,
        heads: Heads,
        device: torch.device,
        *,
        rotate_bytes: int = ROTATE_BYTES,
        max_batch: int = MAX_BATCH,
        max_context: int = MAX_CONTEXT,
        extend: Extend | None = None,
    ) -> None:
        """
        Args:
            extend: what attends in prefill; None for what the environment says.
            max_batch, max_context: of the runners; `grow` raises them to what the cases need.
        """
        self.heads = heads
        self.device = device
        self.rotate_bytes = rotate_bytes
        self.max_batch = max_batch
        self.max_context = max_context
        self.extend = extend
        self.layer = LayerAttention(heads.head_dim**-0.5)
        self._runners: dict[tuple[str, bool, int], AttentionRunner] = {}

    def grow(self, cases: list[Case]) -> None:
        """Make room for every case, before the first runner: all of them share its kernels."""
        self.max_batch = max([self.max_batch, *(case.batch for case in cases)])
        self.max_context = max([self.max_context, *(max(case.lengths) for case in cases)])

    def runner(self, recipe: Recipe, q_len: int = 1) -> AttentionRunner:
        """The one runner of a recipe and some number of query tokens in decode.

        Raises:
            UnsupportedError: this attention cannot run on the device.
        """
        key = recipe.name, recipe.quantize_query, q_len
        if key not in self._runners:
            heads = self.heads
            spec = AttentionSpec(
                heads.q_heads, heads.layout(recipe), torch.bfloat16, recipe.quantize_query
            )
            self._runners[key] = AttentionRunner(
                spec,
                max_batch=self.max_batch,
                max_context=self.max_context,
                max_tokens=self.max_context,
                device=self.device,
                max_q_len=q_len,
                extend=self.extend,
            )
        return self._runners[key]

    def layers(
        self, bytes_per_layer: int, fewest: int = FEWEST_LAYERS, *, rotate: bool = True
    ) -> int:
        """Layers of so many bytes that a graph walks; no more than ``fewest`` without rotate."""
        wanted = fewest
        if rotate:
            wanted = max(fewest, math.ceil(self.rotate_bytes / bytes_per_layer))
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            wanted = min(wanted, int(free * MEMORY_SHARE) // bytes_per_layer)
        return max(1, min(wanted, MOST_LAYERS))

    def pool(self, recipe: Recipe, num_layers: int, num_pages: int) -> KVCachePool:
        """An empty pool with global scales that fit the data, and centers that are not zero."""
        transforms = parse_recipe(recipe.name)[1]
        pool = KVCachePool(
            self.heads.layout(recipe),
            num_layers,
            num_pages,
            self.device,
            centers="center" in transforms,
            rotates="rotate" in transforms,
        )
        if pool.k_center is not None:
            pool.k_center.fill_(0.25)
        for scale in (pool.k_global, pool.v_global):
            if scale is not None:
                scale.fill_(GLOBAL_SCALE)
        return pool

    def filled_pool(self, recipe: Recipe, num_pages: int, *, rotate: bool) -> KVCachePool:
        """A pool whose every slot but those of page 0 holds a random token, in enough layers."""
        runner, heads = self.runner(recipe), self.heads
        layout = runner.spec.layout
        slots_per_layer = num_pages * layout.page_size
        layers = self.layers(slots_per_layer * layout.bytes_per_token, rotate=rotate)
        pool = self.pool(recipe, layers, num_pages)
        slots = torch.arange(layout.page_size, slots_per_layer, device=self.device)
        for chunk in slots.tensor_split(-(-len(slots) // _CHUNK)):
            shape = (len(chunk), heads.kv_heads, heads.head_dim)
            k, v = randn(*shape, device=self.device), randn(*shape, device=self.device)
            runner.store(pool.layer(0), k, v, chunk)
        first, *others = (layer_tensors(pool, i) for i in range(layers))
        for tensors in others:
            for tensor, source in zip(tensors, first, strict=True):
                tensor.copy_(source)
        return pool


@dataclass(frozen=True)
class StoreInputs:
    """Rows to store and where, for each layer of a pool.

    Attributes:
        rows: (k, v, q), ``[T, heads, D]`` each; the numbers are the same in every layer.
        slots: ``[T]`` int64, distinct, none in page 0.
    """

    pool: KVCachePool
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    slots: list[torch.Tensor]


def store_inputs(lab: Lab, recipe: Recipe, case: Case, *, rotate: bool) -> StoreInputs:
    """What a store case writes, into an empty pool of the recipe."""
    heads, device, tokens = lab.heads, lab.device, case.batch * case.new_tokens
    layout, page = heads.layout(recipe), heads.page_size
    num_pages = -(-max(tokens, STORE_SLOTS) // page) + 1
    layer_bytes = num_pages * page * layout.bytes_per_token + case.bytes(recipe)
    layers = lab.layers(layer_bytes, STORE_LAYERS, rotate=rotate)
    k = randn(tokens, heads.kv_heads, heads.head_dim, device=device)
    v = randn(tokens, heads.kv_heads, heads.head_dim, device=device)
    q = randn(tokens, heads.q_heads, heads.head_dim, device=device)
    # A tensor for each layer: a slice of one would not be aligned as the engine's is.
    return StoreInputs(
        lab.pool(recipe, layers, num_pages),
        [(k.clone(), v.clone(), q.clone()) for _ in range(layers)],
        [
            torch.randperm((num_pages - 1) * page, device=device)[:tokens] + page
            for _ in range(layers)
        ],
    )


def free_memory(lab: Lab) -> None:
    """Give the memory of graphs and pools that are gone back to the device."""
    if lab.device.type == "cuda":
        torch.cuda.empty_cache()


def layer_tensors(pool: KVCachePool, index: int) -> list[torch.Tensor]:
    """Data, scales and sink tokens of one layer of a pool."""
    cache = pool.layer(index)
    found = (cache.k_data, cache.k_scale, cache.v_data, cache.v_scale, cache.k_first, cache.v_first)
    return [tensor for tensor in found if tensor is not None]
