"""The measured operations, built from what the engine calls: `AttentionRunner` and the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from inkling_backend.attention import DecodePlan, ExtendPlan
from inkling_backend.bench import gate
from inkling_backend.bench.cases import DECODE, STORE, VERIFY, Case
from inkling_backend.bench.data import Lab, layer_tensors, make_batch, randn, store_inputs
from inkling_backend.formats import Query, Recipe
from inkling_backend.reference.store import store as reference_store

# A byte that no store leaves everywhere.
_POISON = 0xFF


@dataclass(frozen=True)
class Prepared:
    """An operation ready to run, one call a layer.

    Attributes:
        calls: layers.
        launch: runs one layer, 0 <= i < calls; can be captured.
        poison: makes the last layer's result wrong, so that a launch must write it.
        check: compares the last layer's result with the reference; raises `GateError`.
    """

    calls: int
    launch: Callable[[int], object]
    poison: Callable[[], object]
    check: Callable[[], None]


def prepare(lab: Lab, recipe: Recipe, case: Case, *, rotate: bool) -> Prepared:
    """The operation of a case in a recipe.

    Args:
        rotate: over as many layers as keep the cache cold, instead of the fewest.

    Raises:
        UnsupportedError: the recipe cannot serve this model.
    """
    build = _store if case.op == STORE else _attention
    return build(lab, recipe, case, rotate)


def _attention(lab: Lab, recipe: Recipe, case: Case, rotate: bool) -> Prepared:
    decodes = case.op in (DECODE, VERIFY)
    runner = lab.runner(recipe, case.new_tokens if decodes else 1)
    heads, device = lab.heads, lab.device
    batch = make_batch(case, lab.max_context, device)
    pool = lab.filled_pool(recipe, batch.num_pages, rotate=rotate)
    rows = case.batch * case.new_tokens
    q = randn(rows, heads.q_heads, heads.head_dim, device=device)
    k = randn(rows, heads.kv_heads, heads.head_dim, device=device)
    v = randn(rows, heads.kv_heads, heads.head_dim, device=device)
    out = torch.empty_like(q)
    plan: DecodePlan | ExtendPlan
    if decodes:
        plan = runner.plan_decode(
            batch.slot_table, batch.rows, batch.seq_lens, case.batch, case.new_tokens
        )
    else:
        plan = runner.plan_extend(
            *(batch.slot_table, batch.rows, batch.seq_lens, batch.qo_indptr),
            *([case.new_tokens] * case.batch, batch.lens),
        )
    query = runner.query(pool.layer(0), q)

    def launch(i: int) -> None:
        cache = pool.layer(i)
        current = query
        if case.store:
            current = runner.store(cache, k, v, batch.new_slots, q)
        runner.run(plan, current, cache, out, lab.layer)

    def check() -> None:
        last = pool.layer(pool.num_layers - 1)
        gate.check_attention(gate.attention_error(last, batch, query, out, lab.layer))

    return Prepared(pool.num_layers, launch, lambda: out.fill_(torch.nan), check)


def _store(lab: Lab, recipe: Recipe, case: Case, rotate: bool) -> Prepared:
    runner = lab.runner(recipe)
    inputs = store_inputs(lab, recipe, case, rotate=rotate)
    pool, last = inputs.pool, inputs.pool.num_layers - 1
    newest: list[Query] = []

    def launch(i: int) -> None:
        k, v, q = inputs.rows[i]
        newest[:] = [runner.store(pool.layer(i), k, v, inputs.slots[i], q)]

    def poison() -> None:
        for tensor in layer_tensors(pool, last):
            tensor.view(torch.uint8).fill_(_POISON)

    def check() -> None:
        expected = lab.pool(recipe, 1, pool.num_pages)
        for tensor in layer_tensors(expected, 0):
            tensor.view(torch.uint8).fill_(_POISON)
        k, v, q = inputs.rows[last]
        right = reference_store(
            *(k, v, inputs.slots[last], expected.layer(0)), q=q, quantize_q=recipe.quantize_query
        )
        assert right is not None
        gate.check_bytes(pool, last, expected)
        gate.check_query(newest[0], right)

    return Prepared(pool.num_layers, launch, poison, check)
