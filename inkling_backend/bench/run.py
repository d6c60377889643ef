"""Rows of results: gate, time, peers; whatever fails costs its own row alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from inkling_backend.bench.cases import EXTEND, STORE, VERIFY, Case
from inkling_backend.bench.data import Lab, free_memory
from inkling_backend.bench.gate import GateError, reason
from inkling_backend.bench.ops import prepare
from inkling_backend.bench.peers import Peers
from inkling_backend.bench.results import Row
from inkling_backend.bench.timing import Meter, copy_time
from inkling_backend.errors import InklingError
from inkling_backend.formats import Recipe

Say = Callable[[str], None]
Emit = Callable[[Row], None]


def small_case(case: Case) -> Case:
    """A case of the same operation that is quick to compute: odd lengths, a partly filled page."""
    if case.op == STORE:
        return replace(case, batch=1, context=301, new_tokens=301)
    if case.op == EXTEND:
        return replace(case, batch=2, context=701, new_tokens=333)
    mean = 701 if case.op == VERIFY else 700
    return replace(case, batch=4, context=mean, ragged=True)


class Bench:
    """One run of some cases in some recipes.

    Args:
        say: called with a line for whatever fails.
        with_peers: whether to measure what else is found on the host.
    """

    def __init__(self, lab: Lab, meter: Meter, say: Say, *, with_peers: bool) -> None:
        self._lab, self._meter, self._say = lab, meter, say
        self._peers = Peers(lab, meter, say) if with_peers else None
        self._faults: dict[str, str] = {}
        self._copies: dict[int, float] = {}

    def run(
        self,
        cases: list[Case],
        recipes: list[Recipe],
        emit: Emit,
        *,
        later: Sequence[Case] = (),
    ) -> bool:
        """Measures every case in every recipe; True if every row has its time.

        Args:
            cases: of one operation.
            emit: called with each row as soon as it is complete.
            later: cases of other operations, whose peers are built beside these.
        """
        self._lab.grow([*cases, *map(small_case, cases)])
        if self._peers is not None:
            # Imports Triton before the peers' threads import it too; the gate reports a refusal.
            with suppress(InklingError):
                self._lab.runner(recipes[0])
            self._peers.warm_up([*cases, *later])
        for recipe in recipes:
            self._check_small(small_case(cases[0]), recipe)
        if self._peers is not None:
            self._peers.wait()
        passed = True
        for case in cases:
            peers = {} if self._peers is None else self._peers.measure(case)
            for recipe in recipes:
                row = self._row(case, recipe)
                if peers:
                    row["peers"] = dict(peers)
                passed &= "us" in row
                emit(row)
        return passed

    def _check_small(self, case: Case, recipe: Recipe) -> None:
        """The gate on a small case, which compiles the kernels too."""
        try:
            prepared = prepare(self._lab, recipe, case, rotate=False)
            for i in range(prepared.calls):
                prepared.launch(i)
            prepared.poison()
            prepared.launch(prepared.calls - 1)
            prepared.check()
        except Exception as error:
            self._faults[recipe.name] = f"{case.name}: {reason(error)}"

    def _row(self, case: Case, recipe: Recipe) -> Row:
        facts = case.facts()
        row: Row = {"op": facts.pop("op"), "format": recipe.name, **facts}
        row["query"] = "mxfp8" if recipe.quantize_query else "bf16"
        try:
            if recipe.name in self._faults:
                raise GateError(self._faults[recipe.name])
            free_memory(self._lab)
            if case.op == EXTEND:
                row["kernels"] = self._lab.runner(recipe).kernels
            row["bytes"] = case.bytes(recipe)
            row |= self._measure(case, recipe)
            row["copy_us"] = round(self._copy(row["bytes"]), 3)
        except Exception as error:
            row["gate"] = "pass" if "us" in row else "fail"
            self._say(f"{case.name} {recipe.name}: {reason(error)}")
        return row

    def _measure(self, case: Case, recipe: Recipe) -> Row:
        prepared = prepare(self._lab, recipe, case, rotate=case.rotates)
        replay = self._meter.capture(prepared.launch, prepared.calls)
        prepared.poison()
        replay()
        prepared.check()
        timing = self._meter.time(replay, prepared.calls, sustained=True)
        row: Row = {"gate": "pass", "us": round(timing.us, 3)}
        if timing.us_sustained is not None:
            row["us_sustained"] = round(timing.us_sustained, 3)
        return row

    def _copy(self, num_bytes: int) -> float:
        if num_bytes not in self._copies:
            lab = self._lab
            self._copies[num_bytes] = copy_time(
                self._meter, num_bytes, lab.device, lab.rotate_bytes
            )
        return self._copies[num_bytes]
