"""The Inkling model on the GPU: a tiny one, beside the engine's own triton backend in BF16.

Engines start side by side. The engine's own computes, as prompts, what the others have said: the
probabilities that it gives are compared with theirs of prefill and of decode.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration import inkling_tiny
from integration.engine import RealEngine
from integration.gpu.report import Case, case
from integration.launch import options
from integration.tiny_models import write_config

# Heads that every kernel takes; windows, extents and the floor of the long-context scale are passed
# by the longer prompts.
CONFIG: dict[str, object] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 512,
    "dense_intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rel_extent": 256,
    "sliding_window_size": 128,
}
PROMPTS = [[(7 * i * i + 3 * i + j) % 2000 + 5 for i in range(n)] for j, n in enumerate((60, 700))]
NEW_TOKENS = 24
# An engine that is not done by then is ended: the first start compiles for a minute or two.
SECONDS = 270.0
SHARED: dict[str, object] = {
    **inkling_tiny.DUMMY,
    "page_size": 128,
    "max_total_tokens": 16384,
    "swa_full_tokens_ratio": 0.5,
    "max_mamba_cache_size": 64,
    "max_running_requests": 8,
    "mem_fraction_static": 0.6,
    "decode_log_interval": 1,
}
GRAPHS: dict[str, object] = {"cuda_graph_max_bs_decode": 2}
CHUNKS: dict[str, object] = {"chunked_prefill_size": 256}
NO_PREFILL_GRAPHS: dict[str, object] = {"cuda_graph_backend_prefill": "disabled"}
EAGER: dict[str, object] = {"disable_cuda_graph": True}
MXFP8_QUERY: dict[str, object] = {"inkling_query_dtype": "mxfp8"}
# The engine's default for the model is a graph of the whole prefill, which the plugin turns off:
# that of "default" is not turned off here.
SETUPS: dict[tuple[str, str], dict[str, object]] = {
    ("mxfp8", "graphs"): GRAPHS | CHUNKS | NO_PREFILL_GRAPHS,
    ("mxfp8", "eager"): EAGER | CHUNKS,
    ("mxfp8", "query"): GRAPHS | NO_PREFILL_GRAPHS | MXFP8_QUERY,
    ("nvfp4", "graphs"): GRAPHS | CHUNKS | NO_PREFILL_GRAPHS,
    ("bf16", "default"): GRAPHS,
}
# Mean difference of log-probabilities, in nats: several times what a CPU shows of the same shape
# against float32 (`integration/test_inkling.py`), a fraction of what leaving the bias out makes.
NEAR = {"bf16": 0.06, "mxfp8": 0.15, "nvfp4": 0.6}
# Kernels that compile for long, and that no backend but FA4 calls, or with other shapes only.
ENV = {
    "SGLANG_OPT_USE_INKLING_FUSED_ATTN_PROLOGUE": "0",
    "SGLANG_OPT_USE_INKLING_REL_PROJ_DISPATCH": "0",
}


@dataclass
class Observed:
    """What one engine did; ``error`` is set if it did not get to the end.

    prompts: log-probabilities of the tokens of each prompt but the first.
    tokens, said: of each answer, and their log-probabilities.
    """

    prompts: list[list[float]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    said: list[list[float]] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    decode_steps: int = 0
    graph_steps: int = 0
    line: str = ""
    log: str = ""
    error: str = ""
    seconds: float = 0.0


def run_inkling(logs: Path) -> Iterator[Case]:
    """A case for each thing that each engine shows."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder, "model"), inkling_tiny.config(**CONFIG))
        env = ENV | inkling_tiny.plugin(Path(folder, "plugin"))
        with ThreadPoolExecutor(len(SETUPS)) as pool:
            running = {
                key: pool.submit(_observe, model, key, extra, index, env)
                for index, (key, extra) in enumerate(SETUPS.items(), 1)
            }
            yield from _cases(model, env, running, logs)


def _options(model: Path, recipe: str | None, index: int, **extra: object) -> dict[str, object]:
    # Engines that start together must not look for free ports in the same range.
    ports = {"port": 41000 + 200 * index, "nccl_port": 41100 + 200 * index}
    return options(model, recipe, **{**SHARED, **ports, **extra})


def _observe(
    model: Path,
    key: tuple[str, str],
    extra: Mapping[str, object],
    index: int,
    env: Mapping[str, str],
) -> Observed:
    seen, start = Observed(), time.monotonic()
    try:
        chosen = _options(model, key[0], index, **extra)
        with RealEngine(chosen, env=env, seconds=SECONDS) as engine:
            try:
                _ask(engine, seen)
            finally:
                seen.log = engine.log
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
        seen.log = seen.log or str(error)
    seen.seconds = time.monotonic() - start
    steps = re.findall(r"Decode batch.*cuda graph: (True|False)", seen.log)
    seen.decode_steps, seen.graph_steps = len(steps), steps.count("True")
    lines = [line.strip() for line in seen.log.splitlines() if "bytes per token" in line]
    seen.line = lines[0] if lines else ""
    return seen


def _ask(engine: RealEngine, seen: Observed) -> None:
    seen.prompts = judge(engine, PROMPTS, [1] * len(PROMPTS))
    engine.call("flush_cache")
    for answer in _generate(engine, PROMPTS):
        seen.tokens.append(answer["output_ids"])
        seen.said.append(_said(answer))
    (answer,) = _generate(engine, [PROMPTS[-1]])
    seen.cached_tokens = answer["meta_info"]["cached_tokens"]
    seen.again = _said(answer)


def _generate(engine: RealEngine, prompts: list[list[int]]) -> Any:
    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return engine.generate(input_ids=prompts, sampling_params=params, return_logprob=True)


def _said(answer: dict[str, Any]) -> list[float]:
    return [each[0] for each in answer["meta_info"]["output_token_logprobs"]]


def judge(engine: RealEngine, prompts: list[list[int]], starts: list[int]) -> list[list[float]]:
    """Log-probabilities that an engine gives the tokens of prompts from some of them on."""
    judged = engine.generate(
        input_ids=prompts,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=[start - 1 for start in starts],
    )
    found = []
    for prompt, start, answer in zip(prompts, starts, judged, strict=True):
        # The first is of the token before, and the engine says nothing of it.
        own = answer["meta_info"]["input_token_logprobs"][1:]
        assert [each[1] for each in own] == prompt[start:]
        found.append([each[0] for each in own])
    return found


def _cases(
    model: Path,
    env: Mapping[str, str],
    running: Mapping[tuple[str, str], Future[Observed]],
    logs: Path,
) -> Iterator[Case]:
    theirs = _options(
        model, None, 0, attention_backend="triton", **EAGER, cuda_graph_backend_prefill="disabled"
    )
    start, log = time.monotonic(), ""
    try:
        with RealEngine(theirs, env=env, seconds=SECONDS + 60) as engine:
            prompts = judge(engine, PROMPTS, [1] * len(PROMPTS))
            detail = f"{time.monotonic() - start:.0f} s, {sum(map(len, prompts))} tokens"
            yield case("inkling, triton: engine runs", "bf16", True, detail)
            for (recipe, setup), future in running.items():
                seen = future.result()
                (logs / f"inkling-{recipe}-{setup}.log").write_text(seen.log)
                if seen.error:
                    failed = f"{seen.seconds:.0f} s; {seen.error[-1500:]}"
                    yield case(f"inkling, {setup}: engine runs", recipe, False, failed)
                    continue
                yield from _cases_of(recipe, setup, seen)
                said = [p + t for p, t in zip(PROMPTS, seen.tokens, strict=True)]
                engine.call("flush_cache")
                own = judge(engine, said, [len(prompt) for prompt in PROMPTS])
                yield _near(f"inkling, {setup}: prefill as triton's", recipe, seen.prompts, prompts)
                yield _near(f"inkling, {setup}: decode as triton's", recipe, seen.said, own)
            log = engine.log
    except Exception as error:
        log = log or str(error)
        detail = f"{type(error).__name__}: {error}"[-1500:]
        yield case("inkling, triton: engine runs", "bf16", False, detail)
    (logs / "inkling-triton.log").write_text(log)
    graphs, eager = (running["mxfp8", setup].result() for setup in ("graphs", "eager"))
    equal = graphs.tokens == eager.tokens and bool(graphs.tokens)
    detail = f"{sum(map(len, graphs.tokens))} tokens"
    yield case("inkling: graphs equal eager", "mxfp8", equal, detail)


def _cases_of(recipe: str, setup: str, seen: Observed) -> Iterator[Case]:
    name = f"inkling, {setup}"
    passed = "triton decode and extend" in seen.line and "a pool of their own" in seen.log
    yield case(f"{name}: engine runs", recipe, passed, f"{seen.seconds:.0f} s; {seen.line}")
    wanted = 0 if setup == "eager" else seen.decode_steps
    passed = seen.decode_steps >= NEW_TOKENS and seen.graph_steps == wanted
    detail = f"{seen.graph_steps} of {seen.decode_steps} decode steps in captured graphs"
    yield case(f"{name}: decode through graphs as configured", recipe, passed, detail)
    apart = max(abs(a - b) for a, b in zip(seen.again, seen.said[-1], strict=True))
    detail = f"{seen.cached_tokens} tokens cached, at most {apart:.4f} nats apart"
    passed = seen.cached_tokens >= 512 and apart <= NEAR[recipe]
    yield case(f"{name}: prefix hit as miss", recipe, passed, detail)


def _near(name: str, recipe: str, one: list[list[float]], other: list[list[float]]) -> Case:
    means, most = [], 0.0
    for ours, theirs in zip(one, other, strict=True):
        apart = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        means.append(sum(apart) / len(apart))
        most = max(most, *apart)
    told = ", ".join(f"{mean:.4f}" for mean in means)
    detail = f"{told} nats apart on average, at most {most:.3f}; {NEAR[recipe]} allowed"
    return case(name, recipe, max(means) <= NEAR[recipe], detail)
