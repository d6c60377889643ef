"""A real server under load and faults, for seconds; `gpu.soaks` does it longer, on a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from integration import launch
from integration.compare import disagreements, steps_of
from integration.soak import FOREIGN, IDENTICAL, KINDS, MODEL, Outcome, errors_of, soak
from integration.tiny_models import write_model

SECONDS, STREAMS = 25, 24


def test_nothing_is_lost_and_nothing_is_wrong(tmp_path: Path) -> None:
    outcome, log = soak(write_model(tmp_path, MODEL), "mxfp8-nvfp4", SECONDS, STREAMS)
    assert outcome.mismatches == []
    assert outcome.requests > IDENTICAL + 40
    assert outcome.tokens > 16 * IDENTICAL
    # Every kind of fault was there.
    assert set(outcome.faults) == set(KINDS) - {"whole", "short"} | {"retracted"}
    assert min(outcome.faults.values()) > 0
    assert "recipe mxfp8-nvfp4" in log


def answer(tokens: list[int], tops: int, retractions: int) -> dict[str, Any]:
    each = [[-0.1, token, None] for token in tokens[len(tokens) - tops :]]
    meta = {"output_top_logprobs": [[top] for top in each], "num_retractions": retractions}
    return {"output_ids": tokens, "meta_info": meta}


def test_only_a_retracted_answer_may_lack_log_probabilities() -> None:
    with pytest.raises(ValueError, match="shorter"):
        steps_of(answer([3, 4, 5], 2, 0))
    whole = steps_of(answer([3, 4, 5], 3, 0))
    assert disagreements([steps_of(answer([3, 4, 5], 2, 1))], [whole]) == []
    assert disagreements([steps_of(answer([7, 4, 5], 2, 1))], [whole]) != []
    assert disagreements([steps_of(answer([3, 4, 9], 2, 1))], [whole]) != []


def test_errors_in_a_log_are_seen() -> None:
    log = "\n".join(
        [
            "[t] Prefill batch, #new-seq: 1, 'ValueError' is only a word here",
            "Traceback (most recent call last):",
            "  ValueError: inside a frame",
            f"AttributeError: {FOREIGN}",
            "ValueError: token_to_kv_pool_allocator memory leak detected! available_size=1",
            "some.module.OwnError: no",
            "[t] pool memory leak detected! 3 of 4",
        ]
    )
    found = errors_of(log)
    assert len(found) == 3
    assert not [line for line in found if FOREIGN in line]


def test_a_summary_names_the_figures() -> None:
    outcome = Outcome(requests=7, tokens=20, mismatches=["page 0 was written"])
    outcome.faults["hung up"] = 2
    first, second = outcome.summary().splitlines()
    assert "7 requests, 2 faults injected (2 hung up), 20 tokens compared, 1 mismatches" in first
    assert second == "page 0 was written"
    figures = json.loads(json.dumps(outcome.figures()))
    assert figures["faults"] == {"hung up": 2}
    assert figures["mismatches"] == ["page 0 was written"]


def test_a_busy_engine_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((False, False, True))
    launch.insist(lambda: next(answers), "flush")
    assert not list(answers)
    monkeypatch.setattr(launch, "IDLE_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="no flush"):
        launch.insist(lambda: False, "flush")
