"""Requests in random pages, and pools full of random tokens."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.bench.cases import DECODE, RECIPE_NAMES, STORE, VERIFY, Case
from inkling_backend.bench.data import layer_tensors, make_batch, store_inputs
from inkling_backend.formats import get_recipe
from inkling_backend.reference import gather
from tests.bench.world import HEADS, make_lab


def test_every_token_has_a_slot_of_its_own(device: torch.device) -> None:
    case = Case(VERIFY, 4, 100, 3, HEADS, ragged=True)
    batch = make_batch(case, 512, device)
    assert batch.slot_table.shape == (4, 512)
    slots = [batch.slot_table[b, :n] for b, n in enumerate(batch.lens)]
    flat = torch.cat(slots)
    assert len(flat.unique()) == len(flat) == 400
    assert int(flat.min()) >= HEADS.page_size
    assert int(flat.max()) < batch.num_pages * HEADS.page_size
    for b, length in enumerate(batch.lens):
        positions = torch.arange(length, device=device)
        pages = batch.page_table[b, positions // HEADS.page_size]
        assert torch.equal(slots[b], pages * HEADS.page_size + positions % HEADS.page_size)
        assert torch.equal(batch.new_slots[3 * b : 3 * b + 3], slots[b][-3:].long())
    assert batch.qo_indptr.tolist() == [0, 3, 6, 9, 12]


def test_short_columns_are_widened(device: torch.device) -> None:
    batch = make_batch(Case(DECODE, 2, 100, 1, HEADS), 0, device)
    assert batch.slot_table.shape == (2, 128)


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_pools_hold_random_numbers_in_every_layer(name: str, device: torch.device) -> None:
    lab = make_lab(device)
    pool = lab.filled_pool(get_recipe(name), 6, rotate=True)
    assert pool.num_layers >= 4
    slots = torch.arange(HEADS.page_size, pool.num_slots, device=device)
    for i in (0, pool.num_layers - 1):
        for side in ("k", "v"):
            values = gather(slots, pool.layer(i), side, torch.float32)
            assert bool(torch.isfinite(values).all())
            assert 0.9 < float(values.std()) < 1.1
    for tensor, first in zip(layer_tensors(pool, 1), layer_tensors(pool, 0), strict=True):
        assert torch.equal(tensor, first)


def test_layers_rotate_over_enough_bytes(device: torch.device) -> None:
    lab = make_lab(torch.device("cpu"))
    assert lab.layers(1 << 10) == 64
    assert lab.layers(1 << 20) == 4
    assert lab.layers(1 << 10, rotate=False) == 4
    assert lab.layers(1) == 2048


def test_stores_go_to_distinct_slots(device: torch.device) -> None:
    lab = make_lab(device)
    inputs = store_inputs(lab, get_recipe("nvfp4"), Case(STORE, 1, 50, 50, HEADS), rotate=False)
    assert inputs.pool.num_layers == len(inputs.slots) == len(inputs.rows) == 32
    for slots in inputs.slots:
        assert len(slots.unique()) == 50
        assert HEADS.page_size <= int(slots.min())
        assert int(slots.max()) < inputs.pool.num_slots
    assert not torch.equal(inputs.slots[0], inputs.slots[1])


def test_runners_have_room_for_every_case() -> None:
    lab = make_lab(torch.device("cpu"))
    lab.grow([Case(DECODE, 9, 100, 1, HEADS), Case(DECODE, 2, 3000, 1, HEADS)])
    runner = lab.runner(get_recipe("mxfp8"))
    assert (runner.max_batch, runner.max_context) == (9, 3000)
    assert lab.runner(get_recipe("mxfp8")) is runner
