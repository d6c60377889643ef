"""Engines one after the other, each in a process of its own."""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inkling_backend.bench import engine
from inkling_backend.bench.cases import ENGINE, Case, Heads
from inkling_backend.bench.compare import label
from inkling_backend.bench.results import Row, identity
from inkling_backend.engines.sglang import measure
from inkling_backend.errors import UnknownNameError

CASES = [Case(ENGINE, 64, 8192, 1, Heads()), Case(ENGINE, 1, 1024, 1, Heads())]
SERVER = engine.Server(0.8)
FAKE = "tests.bench.fake_engine"


def test_options_choose_the_backend_and_the_recipe(tmp_path: Path) -> None:
    model = engine.write_model(tmp_path, Heads())
    ours = engine.options(model, "inkling", "kvfp4", CASES, SERVER)
    assert ours["kv_cache_dtype"] == "fp4_mx_block16"
    assert engine.options(model, "inkling", "bf16", CASES, SERVER)["kv_cache_dtype"] == "bf16"
    theirs = engine.options(model, "fa3", "bf16", CASES, SERVER)
    assert "kv_cache_dtype" not in theirs
    assert ours["cuda_graph_bs_decode"] == theirs["cuda_graph_bs_decode"] == [1, 64]
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (32, 8)


def test_rows_of_several_gpus_say_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both = engine.Server(tp=2)
    assert engine.options(tmp_path, "inkling", "mxfp8", CASES, both)["tp_size"] == 2
    monkeypatch.setattr(engine, "measure", partial(engine.measure, module=FAKE))
    rows: list[Row] = []
    engine.run(CASES[:1], ["nvfp4"], both, rows.append, print, peers=())
    assert [label(row) for row in rows] == ["engine_decode inkling nvfp4 64x8k tp 2"]
    assert ("tp", 2) in identity(rows[0])


def test_recipes_that_the_engine_has() -> None:
    assert engine.engine_recipes([]) == ["mxfp8", "nvfp4", "kvfp4", "bf16", "mxfp4", "mxfp8-nvfp4"]
    assert engine.engine_recipes(["nvfp4"]) == ["nvfp4"]
    with pytest.raises(UnknownNameError, match="nvfp4-mxfp8"):
        engine.engine_recipes(["nvfp4-mxfp8"])


def test_rows_come_with_the_peers_measured_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "measure", partial(engine.measure, module=FAKE))
    rows: list[Row] = []
    said: list[str] = []
    assert engine.run(CASES, ["nvfp4"], SERVER, rows.append, said.append, peers=tuple(engine.PEERS))
    found = [(row["backend"], row["format"], row["batch"]) for row in rows]
    assert found == [
        (backend, name, batch)
        for backend, name in (("flashinfer", "bf16"), ("fa3", "bf16"), ("inkling", "nvfp4"))
        for batch in (64, 1)
    ]
    assert rows[-1]["peers"] == {"flashinfer_bf16": 5.0, "fa3_bf16": 5.0}
    assert rows[-1]["kv_tokens"] == 7
    assert "peers" not in rows[0]
    (text,) = said
    assert "fa3" in text
    assert "flash_ops is missing" in text


def test_a_failed_recipe_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job: object) -> list[Row]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine, "measure", fail)
    said: list[str] = []
    assert not engine.run(CASES, ["nvfp4"], SERVER, said.append, said.append, peers=())  # type: ignore[arg-type]
    assert said == ["engine with inkling nvfp4: no memory"]


def test_an_engine_is_told_to_have_died_of_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ("Traceback", "  File x", "IndexError: out of range", "a", "b", "c")
    (tmp_path / "dying.py").write_text(f"import sys\nsys.exit({chr(10).join(said)!r})\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"ended with status 1: IndexError: out of range$"):
        list(engine.measure({}, module="dying"))


def test_a_hanging_engine_is_ended() -> None:
    job = {"engine": {}, "shapes": [], "sleep": True}
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="status -9"):
        list(engine.measure(job, seconds=2, module=FAKE))
    assert time.monotonic() - start < 30


class FakeEngine:
    """Streams like the engine: one chunk a request and step, the first step late."""

    def __init__(self, *, merged: bool = False) -> None:
        self.requests: list[tuple[int, int, int]] = []
        self._merged = merged

    def get_server_info(self) -> dict[str, Any]:
        return {"max_total_num_tokens": 1234}

    def generate(
        self, *, input_ids: list[list[int]], sampling_params: dict[str, Any], stream: bool
    ) -> Any:
        assert stream
        count = sampling_params["max_new_tokens"]
        self.requests.append((len(input_ids), len(input_ids[0]), count))
        step = 2 if self._merged else 1
        for done in range(step, count + 1, step):
            time.sleep(0.05 if done == step else 0.002 * step)
            for index in range(len(input_ids)):
                yield {"index": index, "meta_info": {"completion_tokens": done}}


@pytest.mark.parametrize("merged", [False, True])
def test_steps_are_the_time_of_one_token(merged: bool) -> None:
    fake = FakeEngine(merged=merged)
    results = list(measure.measure(fake, [(2, 100)], 50))
    (result,) = results
    assert (result["batch"], result["context"], result["kv_tokens"]) == (2, 100, 1234)
    assert 2000 <= result["us"] < 10000
    assert 50 <= result["ttft_ms"] < 500
    assert fake.requests[0][:2] == (1, 50)
    batch, prompt, new = fake.requests[-1]
    assert batch == 2
    assert prompt + new == 100


def test_too_few_tokens_are_an_error() -> None:
    class Silent(FakeEngine):
        def generate(self, **arguments: Any) -> Any:
            yield {"index": 0, "meta_info": {"completion_tokens": 1}}

    with pytest.raises(RuntimeError, match="streamed"):
        list(measure.measure(Silent(), [(1, 100)], 50))
