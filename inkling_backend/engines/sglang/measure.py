"""Times of one started engine: body of a process of its own.

The one argument is JSON: ``engine`` (keywords of ``sglang.Engine``), ``shapes`` (pairs of requests
and tokens of context) and ``prompt_tokens``. The engine ends the whole process that it lives in
when one of its children fails, so it gets one. Every line on stdout is a JSON object of `measure`;
whatever the engine prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

# Output tokens of a measurement; the median step hides the first, which waits for other prompts.
_TOKENS = 33
_FIRST_TOKEN_RUNS = 3
# Token numbers below this are ordinary words in any vocabulary.
_WORDS = 1000


def measure(
    engine: Any, shapes: list[tuple[int, int]], prompt_tokens: int
) -> Iterator[dict[str, Any]]:
    """A result for each shape, as they come.

    Args:
        engine: a started ``sglang.Engine``.
        shapes: (requests, tokens of context) of the decode steps.
        prompt_tokens: length of the prompt for the time to first token.

    Yields:
        ``batch``, ``context``, ``us`` (microseconds of a decode step), ``ttft_ms``, ``kv_tokens``.
    """
    tokens = int(engine.get_server_info()["max_total_num_tokens"])
    _steps(engine, 1, prompt_tokens)  # the first run of everything
    first = statistics.median(_first_token(engine, prompt_tokens) for _ in range(_FIRST_TOKEN_RUNS))
    for batch, context in shapes:
        step = statistics.median(_steps(engine, batch, max(1, context - _TOKENS)))
        yield {
            "batch": batch,
            "context": context,
            "us": round(step * 1e6, 1),
            "ttft_ms": round(first * 1e3, 3),
            "kv_tokens": tokens,
        }


def _prompt(tokens: int) -> list[int]:
    """A random prompt: nothing of it is in the prefix cache."""
    return random.choices(range(10, _WORDS), k=tokens)


def _stream(engine: Any, batch: int, prompt_tokens: int, new_tokens: int) -> Iterator[Any]:
    return engine.generate(
        input_ids=[_prompt(prompt_tokens) for _ in range(batch)],
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        stream=True,
    )


def _first_token(engine: Any, prompt_tokens: int) -> float:
    """Seconds until the first token of one request."""
    stream = _stream(engine, 1, prompt_tokens, 2)
    start = time.perf_counter()
    next(stream)
    seconds = time.perf_counter() - start
    for _ in stream:
        pass
    return seconds


def _steps(engine: Any, batch: int, prompt_tokens: int) -> list[float]:
    """Seconds a token between the outputs of the first request, of a batch that decodes together.

    Raises:
        RuntimeError: the engine streamed fewer tokens than were asked for.
    """
    times: list[float] = []
    counts: list[int] = []
    for chunk in _stream(engine, batch, prompt_tokens, _TOKENS):
        if chunk.get("index", 0) == 0:
            times.append(time.perf_counter())
            counts.append(int(chunk["meta_info"]["completion_tokens"]))
    gaps = [
        (times[i] - times[i - 1]) / (counts[i] - counts[i - 1])
        for i in range(1, len(times))
        if counts[i] > counts[i - 1]
    ]
    if len(gaps) < _TOKENS // 4:
        raise RuntimeError(f"expected {_TOKENS} streamed tokens, got {counts}")
    return gaps


def main() -> None:
    """Start the engine that the argument describes and print what is measured."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    random.seed(0)

    import sglang

    engine = sglang.Engine(**job["engine"])
    shapes = [(batch, context) for batch, context in job["shapes"]]
    for result in measure(engine, shapes, job["prompt_tokens"]):
        print(json.dumps(result), file=results, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
