"""Real server processes over HTTP, started by both commands that people use."""

from __future__ import annotations

import re
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from inkling_backend.engines.sglang.metrics import GAUGES, INFO
from integration.launch import options
from integration.model import QUESTION
from integration.server import LAUNCH_SERVER, SERVE, Server

STARTS = {
    "serve with a recipe flag": (SERVE, "kvfp4", {}),
    "launch_server with a dtype flag": (
        LAUNCH_SERVER,
        "mxfp8",
        {"kv_cache_dtype": "mxfp8", "enable_metrics": True},
    ),
}


@pytest.fixture(scope="module", params=STARTS)
def server(request: pytest.FixtureRequest, model: Path) -> Iterator[Server]:
    program, recipe, extra = STARTS[request.param]
    with Server(options(model, recipe, **extra), program) as running:
        yield running


def test_chat_completion(server: Server) -> None:
    assert "Paris" in server.chat(QUESTION)


def test_streaming_gives_the_same_answer_in_pieces(server: Server) -> None:
    pieces = [piece for piece in server.stream(QUESTION) if piece]
    assert len(pieces) > 1
    assert "".join(pieces) == server.chat(QUESTION)


def test_concurrent_requests_get_the_answers_they_get_alone(server: Server) -> None:
    questions = [f"Name the capital of {name}." for name in ("France", "Italy", "Japan")]
    alone = [server.chat(question, max_tokens=12) for question in questions]
    with ThreadPoolExecutor(len(questions)) as pool:
        together = pool.map(lambda question: server.chat(question, max_tokens=12), questions)
        assert list(together) == alone


def test_an_abandoned_stream_leaves_the_server_serving(server: Server) -> None:
    stream = server.stream("Tell me a long story about a river.", max_tokens=200)
    next(stream)
    stream.close()
    assert "Paris" in server.chat(QUESTION)


def test_metrics_say_what_the_cache_is(server: Server) -> None:
    if "--enable-metrics" not in server.flags:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.metrics()
        return
    page = {name: value for name, value in server.metrics().items() if "inkling:" in name}
    (info,) = (name for name in page if name.startswith(INFO))
    for label in ('recipe="mxfp8"', 'query="bfloat16"', 'model_name="'):
        assert label in info
    assert page[info] == 1
    values = {name: value for full, value in page.items() if (name := full.split("{")[0]) != INFO}
    assert set(values) == set(GAUGES)
    told = re.search(r"(\d+) bytes per token .* (\d+) tokens in the pool", server.log)
    assert told is not None
    per_token, tokens = map(int, told.groups())
    assert values["inkling:kv_cache_bytes_per_token"] == per_token
    assert values["inkling:kv_cache_tokens"] == tokens
    # The padding page is no place for tokens.
    assert values["inkling:kv_cache_bytes"] == per_token * (tokens + 128)
    assert values["inkling:workspace_bytes"] >= 0
