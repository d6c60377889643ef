"""Every kernel a few times at small shapes: the program that ``sanitizer.py`` runs under its tools.

python -m integration.gpu.sanitized --recipe mxfp8
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, LayerAttention
from inkling_backend.cache import KVCachePool
from inkling_backend.formats import RECIPES, Recipe, get_recipe
from inkling_backend.formats.layout import CacheLayout
from inkling_backend.kernels.gather import gather

PAGE = 64
# One around pages and tiles, several chunks, and a row of padding.
LENS = (1, 33, 64, 65, 300, 0)
# head_dim, query heads of a KV head: `decode_fast` takes the first, `decode` the second.
SHAPES = ((128, 4), (96, 3))


def run_recipe(recipe: Recipe, device: torch.device) -> int:
    """Store, attend and gather with a recipe, in every kernel; gives the number of kernel calls."""
    calls = 0
    for head_dim, group in SHAPES:
        layout = CacheLayout(recipe.k, recipe.v, 2, head_dim, head_dim, PAGE)
        sinks = torch.zeros(2 * group, dtype=torch.bfloat16, device=device)
        first = replace(layout, sink_tokens=3 if recipe.is_quantized else 0)
        for layer, pages in (
            (LayerAttention(0.1), first),
            (LayerAttention(0.1, window=40, softcap=5.0, sinks=sinks), layout),
        ):
            calls += _run(recipe, pages, group, layer, device)
    return calls


def _run(
    recipe: Recipe, layout: CacheLayout, group: int, layer: LayerAttention, device: torch.device
) -> int:
    heads, head_dim = layout.num_kv_heads, layout.k_head_dim
    pages = [-(-n // PAGE) for n in LENS]
    # Once as they are, once centered and rotated (which a BF16 cache never is).
    transforms = recipe.k.block > 0 and layer.softcap is None
    pool = KVCachePool(layout, 1, 1 + sum(pages), device, centers=transforms, rotates=transforms)
    cache = pool.layer(0)
    context = max(LENS) + PAGE
    spec = AttentionSpec(group * heads, layout, torch.bfloat16, recipe.takes_mxfp8_query)
    runner = AttentionRunner(
        spec,
        max_batch=len(LENS),
        max_context=context,
        max_tokens=cache.num_pages * PAGE,
        device=device,
    )
    # Pages from the last to the first, so that a request's are not in order.
    table = torch.zeros(len(LENS), context, dtype=torch.int32)
    page = cache.num_pages
    for row, count in zip(table, pages, strict=True):
        for i in range(count):
            page -= 1
            row[i * PAGE : (i + 1) * PAGE] = page * PAGE + torch.arange(PAGE)
    slots = torch.cat([row[:n] for row, n in zip(table, LENS, strict=True)])
    table, slots = table.to(device), slots.long().to(device)
    rows, lens = torch.arange(len(LENS), device=device), torch.tensor(LENS, device=device)

    def normal(tokens: int, count: int) -> torch.Tensor:
        return torch.randn(tokens, count, head_dim).to(torch.bfloat16).to(device)

    total = sum(LENS)
    k, v, q = normal(total, heads), normal(total, heads), normal(total, group * heads)
    k[40] *= 1e9  # beyond float16: `decode_redo` has work
    v[70] = torch.nan
    query = runner.store(cache, k, v, slots, q)
    qo_indptr = torch.tensor([0, *LENS], device=device).cumsum(0)
    plan = runner.plan_extend(table, rows, lens, qo_indptr, LENS, LENS)
    runner.run(plan, query, cache, torch.empty_like(q), layer)

    last = (lens.cumsum(0) - 1).clamp(min=0)
    batch = len(LENS)
    new_slots = torch.where(lens > 0, slots[last], 0)
    query = runner.store(
        cache, k[last].contiguous(), v[last].contiguous(), new_slots, q[last].contiguous()
    )
    decode = runner.plan_decode(table, rows, lens, batch)
    runner.run(decode, query, cache, torch.empty_like(q[:batch]), layer)
    for side in ("k", "v"):
        gather(slots, cache, side)
    torch.cuda.synchronize(device)
    return 9


def main() -> None:
    """Run the recipes that are asked for and say that it came to the end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, action="append", help="default: all")
    args = parser.parse_args()
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU")
    device = torch.device("cuda", 0)
    calls = sum(run_recipe(get_recipe(name), device) for name in args.recipe or RECIPES)
    print(f"{calls} kernel calls")


if __name__ == "__main__":
    main()
