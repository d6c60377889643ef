"""The gate lets right results through and wrong ones not, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.bench import gate
from inkling_backend.bench.cases import (
    DECODE,
    EXTEND,
    RECIPE_NAMES,
    STORE,
    VERIFY,
    Case,
    parse_recipe,
)
from inkling_backend.bench.data import layer_tensors
from inkling_backend.bench.ops import prepare
from inkling_backend.formats import Query, get_recipe
from tests.bench.world import HEADS, make_lab

CASES = {
    "decode": Case(DECODE, 3, 40, 1, HEADS, ragged=True),
    "decode + store": Case(DECODE, 2, 40, 1, HEADS, store=True),
    "verify": Case(VERIFY, 2, 40, 4, HEADS),
    "extend": Case(EXTEND, 1, 70, 66, HEADS),
    "store": Case(STORE, 1, 20, 20, HEADS),
}


@pytest.mark.parametrize("name", [*RECIPE_NAMES, "mxfp8+center+rotate", "nvfp4+rotate+sinks2"])
@pytest.mark.parametrize("case", CASES)
def test_every_operation_passes(case: str, name: str, device: torch.device) -> None:
    prepared = prepare(make_lab(device), parse_recipe(name)[0], CASES[case], rotate=False)
    last = prepared.calls - 1
    prepared.launch(last)
    prepared.poison()
    with pytest.raises(gate.GateError):
        prepared.check()
    prepared.launch(last)
    prepared.check()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("case", ["decode", "extend", "store"])
def test_the_kernels_pass(
    case: str, quantized: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    recipe = get_recipe("mxfp8")
    recipe = recipe.with_mxfp8_query() if quantized else recipe
    prepared = prepare(make_lab(device), recipe, CASES[case], rotate=False)
    last = prepared.calls - 1
    prepared.launch(last)
    prepared.poison()
    prepared.launch(last)
    prepared.check()


def test_a_wrong_head_fails(device: torch.device) -> None:
    got = torch.randn(3, 32, 128, device=device)
    wrong = got.clone()
    wrong[:, 7] = got[:, 8]
    gate.check_attention(gate.relative_error(got.bfloat16(), got))
    with pytest.raises(gate.GateError, match="relative error"):
        gate.check_attention(gate.relative_error(wrong, got))
    wrong[0, 0, 0] = torch.nan
    assert gate.relative_error(wrong, got) == float("inf")


def test_a_wrong_byte_fails(device: torch.device) -> None:
    lab, recipe = make_lab(device), get_recipe("mxfp8")
    one, other = lab.pool(recipe, 2, 3), lab.pool(recipe, 1, 3)
    gate.check_bytes(one, 1, other)
    for tensor in layer_tensors(one, 1):
        tensor.view(-1)[5] += 1
        with pytest.raises(gate.GateError, match=r"1 of .* bytes differ"):
            gate.check_bytes(one, 1, other)
        tensor.view(-1)[5] -= 1
    gate.check_bytes(one, 1, other)


def test_a_wrong_query_fails(device: torch.device) -> None:
    q = torch.randn(2, 4, 32, device=device)
    right = Query.quantize(q)
    gate.check_query(right, Query.quantize(q))
    assert right.scale is not None
    wrong = Query(right.data, right.scale + 1)
    with pytest.raises(gate.GateError, match="query scales"):
        gate.check_query(wrong, right)
    with pytest.raises(gate.GateError, match="not quantized"):
        gate.check_query(Query(right.data), right)


def test_places_that_are_compared() -> None:
    assert gate.spread(1, 64, 3) == [0]
    assert gate.spread(2048, 64, 3) == [0, 992, 1984]
    assert gate.spread(64, 1, 3) == [0, 31, 63]
