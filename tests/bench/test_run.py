"""Rows: what is in them, and that a failure costs its own row alone."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.bench import run as running
from inkling_backend.bench.cases import DECODE, EXTEND, STORE, VERIFY, Case
from inkling_backend.bench.ops import Prepared, prepare
from inkling_backend.bench.results import Row
from inkling_backend.bench.run import Bench, small_case
from inkling_backend.formats import get_recipe
from tests.bench import libraries
from tests.bench.world import HEADS, FakeMeter, make_lab

CASES = [Case(DECODE, 2, 40, 1, HEADS), Case(DECODE, 1, 70, 1, HEADS)]
RECIPES = [get_recipe("mxfp8"), get_recipe("mxfp8-nvfp4")]


@pytest.fixture
def said() -> list[str]:
    return []


def bench(said: list[str], *, with_peers: bool = False) -> tuple[Bench, FakeMeter]:
    meter = FakeMeter()
    lab = make_lab(torch.device("cpu"))
    return Bench(lab, meter, said.append, with_peers=with_peers), meter


def test_a_row_for_each_case_and_recipe(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.install(monkeypatch)
    rows: list[Row] = []
    made, _ = bench(said, with_peers=True)
    assert made.run(CASES, RECIPES, rows.append)
    assert said == []
    assert [(row["batch"], row["format"]) for row in rows] == [
        (case.batch, recipe.name) for case in CASES for recipe in RECIPES
    ]
    facts = {"op": "decode", "format": "mxfp8", "batch": 2, "context": 40}
    heads = {"q_heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 32}
    times = {"us": 10.0, "us_sustained": 11.0, "copy_us": 10.0, "gate": "pass"}
    row = dict(rows[0])
    assert row.pop("peers").keys() >= {"flashinfer_bf16", "fa3_bf16"}
    assert row == {**facts, **heads, **times, "query": "bf16", "bytes": CASES[0].bytes(RECIPES[0])}


def test_peers_and_copies_are_measured_once(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch)
    made, meter = bench(said, with_peers=True)
    made.run(CASES[:1], [RECIPES[0], RECIPES[0]], lambda row: None)
    # Five peers, two rows, one copy of as many bytes.
    assert meter.timed == 5 + 2 + 1


@pytest.mark.parametrize(
    "case",
    [Case(VERIFY, 2, 40, 4, HEADS), Case(EXTEND, 1, 70, 40, HEADS), Case(STORE, 1, 9, 9, HEADS)],
    ids=lambda case: case.op,
)
def test_other_operations(case: Case, said: list[str]) -> None:
    rows: list[Row] = []
    made, _ = bench(said)
    assert made.run([case], RECIPES, rows.append)
    assert [row["new_tokens"] for row in rows] == [case.new_tokens] * 2
    assert said == []


def spoiled(where: int) -> object:
    """`prepare` whose kernel adds to the output of calls number ``where`` and later."""
    count = 0

    def make(*arguments: object, **more: object) -> Prepared:
        nonlocal count
        count += 1
        real = prepare(*arguments, **more)  # type: ignore[arg-type]
        if count < where:
            return real
        return Prepared(real.calls, lambda i: None, real.poison, real.check)

    return make


def test_a_wrong_result_has_no_time(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "prepare", spoiled(2))
    rows: list[Row] = []
    made, meter = bench(said)
    assert not made.run(CASES, RECIPES[:1], rows.append)
    assert [row["gate"] for row in rows] == ["fail", "fail"]
    assert not any({"us", "us_sustained", "copy_us"} & row.keys() for row in rows)
    assert meter.timed == 0
    assert [text.split(":")[0] for text in said] == ["decode 2x40 mxfp8", "decode 1x70 mxfp8"]


def test_a_recipe_wrong_on_the_small_case_is_not_run(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "prepare", spoiled(1))
    rows: list[Row] = []
    made, meter = bench(said)
    assert not made.run(CASES, RECIPES[:1], rows.append)
    assert [row["gate"] for row in rows] == ["fail", "fail"]
    assert meter.timed == 0
    assert all("decode 4x700 ragged" in text for text in said)


def test_an_exception_costs_one_row(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_for_two(lab: object, recipe: object, case: Case, **more: object) -> Prepared:
        if case.batch == 2:
            raise torch.cuda.OutOfMemoryError("no memory")
        return prepare(lab, recipe, case, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "prepare", fail_for_two)
    rows: list[Row] = []
    made, _ = bench(said)
    assert not made.run(CASES, RECIPES, rows.append)
    assert [row["gate"] for row in rows] == ["fail", "fail", "pass", "pass"]
    assert "no memory" in said[0]


def test_small_cases_keep_the_operation() -> None:
    for case in (*CASES, Case(VERIFY, 9, 99, 8, HEADS), Case(DECODE, 2, 40, 1, HEADS, store=True)):
        small = small_case(case)
        assert (small.op, small.store, small.ragged) == (case.op, case.store, True)
        assert min(small.lengths) >= small.new_tokens == case.new_tokens
