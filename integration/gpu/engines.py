"""The real engine on the GPU: every recipe, with CUDA graphs and without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from integration.engine import RealEngine
from integration.gpu.report import Case, case
from integration.gpu.watch import Watched, watch
from integration.launch import RECIPES, options

# Engines side by side on one GPU: most of a start is imports and compilation on the CPU.
WORKERS = 9
QUESTION = "What is the capital of France?"
# The answer is begun for the model. By itself it gives 'The' 18 % and 'L' (of a French answer)
# 14 %, which rounding decides; ' Paris' after this has 96 %.
BEGUN = "The capital of France is"
NEW_TOKENS = 32
# 8 is a captured size, so the padded batch of a graph is the batch of an eager run: equal tokens
# then say something about attention and nothing about other matrix shapes.
BATCH = 8
STORY = "The river rises in the hills north of the town and flows south through three lakes. "
# Every engine takes a small share, as several run at once.
SHARED: dict[str, object] = {
    "max_total_tokens": 32768,
    "mem_fraction_static": 0.6,
    "decode_log_interval": 1,
    "max_running_requests": 16,
}
GRAPHS: dict[str, object] = {"cuda_graph_max_bs_decode": 16}
NO_PREFILL_GRAPHS: dict[str, object] = {"cuda_graph_backend_prefill": "disabled"}
EAGER: dict[str, object] = {"disable_cuda_graph": True}
SETUPS: dict[str, dict[str, object]] = {
    "graphs": GRAPHS | NO_PREFILL_GRAPHS,
    "eager": EAGER,
}
# The engine's default, graphs for prefill too; fewer sizes than by default, to save the time.
DEFAULT = GRAPHS | {"cuda_graph_max_bs_prefill": 512}


@dataclass
class Observed(Watched):
    """What one engine said."""

    answer: str = ""
    padded: list[str] = field(default_factory=list)
    alone: list[list[int]] = field(default_factory=list)
    batch: list[list[int]] = field(default_factory=list)
    cached_tokens: int = 0
    hit_equals_miss: bool = False


def run_engines(model: Path, logs: Path) -> Iterator[Case]:
    """Starts all engines; gives their cases, recipe by recipe."""
    starts = {(recipe, setup): keys for recipe in RECIPES for setup, keys in SETUPS.items()}
    starts["mxfp8", "default"] = DEFAULT
    pool = ThreadPoolExecutor(WORKERS)
    running = {
        key: pool.submit(_observe, model, key[0], extra, index)
        for index, (key, extra) in enumerate(starts.items())
    }
    pool.shutdown(wait=False)  # takes nothing more
    return _cases(running, logs)


def _cases(running: dict[tuple[str, str], Future[Observed]], logs: Path) -> Iterator[Case]:
    for recipe in RECIPES:
        seen = {setup: running[recipe, setup].result() for setup in SETUPS}
        for setup, observed in seen.items():
            _keep_log(logs, recipe, setup, observed)
            yield from _cases_of(recipe, setup, observed)
        yield _equal(recipe, "graphs equal eager", seen["graphs"], seen["eager"])
    default = running["mxfp8", "default"].result()
    _keep_log(logs, "mxfp8", "default", default)
    yield from _cases_of("mxfp8", "default", default)


def _observe(model: Path, recipe: str, extra: Mapping[str, object], index: int) -> Observed:
    seen = Observed()
    keywords = options(model, recipe, **{**SHARED, **extra})
    watch(seen, keywords, lambda engine: _question(engine, seen), 31000 + 200 * index)
    return seen


def _question(engine: RealEngine, observed: Observed) -> None:
    prompt = engine.call("chat_prompt", question=QUESTION) + BEGUN
    (answer,) = engine.generate(prompt=[prompt], sampling_params={"max_new_tokens": 16})
    observed.answer = answer["text"]
    # Three requests in a graph of four: the padding row must disturb nobody.
    answers = engine.generate(prompt=[prompt] * 3, sampling_params={"max_new_tokens": 16})
    observed.padded = [answer["text"] for answer in answers]

    story = engine.encode(STORY)
    prompts = [(story * 60)[: 3 + 149 * i] for i in range(BATCH)]  # 3 to 1046 tokens
    engine.call("flush_cache")
    for each in (prompts[0], prompts[3], prompts[-1]):
        observed.alone += engine.tokens([each], NEW_TOKENS)
    engine.call("flush_cache")
    observed.batch = engine.tokens(prompts, NEW_TOKENS)

    params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    engine.call("flush_cache")
    (miss,) = engine.generate(input_ids=[prompts[-1]], sampling_params=params)
    (hit,) = engine.generate(input_ids=[prompts[-1]], sampling_params=params)
    observed.cached_tokens = hit["meta_info"]["cached_tokens"]
    observed.hit_equals_miss = hit["output_ids"] == miss["output_ids"]


def _cases_of(recipe: str, setup: str, seen: Observed) -> Iterator[Case]:
    if seen.error:
        yield case(f"{setup}: engine runs", recipe, False, seen.error[-1500:])
        return
    facts = f"{seen.seconds:.0f} s; {' '.join(seen.cache_lines[:1])}"
    yield case(f"{setup}: engine runs", recipe, bool(seen.cache_lines), facts)
    yield case(f"{setup}: answer", recipe, "Paris" in seen.answer, seen.answer)
    paris = [text for text in seen.padded if "Paris" in text]
    yield case(f"{setup}: batch of 3", recipe, len(paris) == 3, " | ".join(seen.padded))
    detail = f"{seen.cached_tokens} tokens cached, equal tokens: {seen.hit_equals_miss}"
    passed = seen.hit_equals_miss and seen.cached_tokens >= 896
    yield case(f"{setup}: prefix hit equals miss", recipe, passed, detail)
    detail = f"{seen.graph_steps} of {seen.decode_steps} decode steps in captured graphs"
    wanted = 0 if setup == "eager" else seen.decode_steps
    passed = seen.decode_steps > NEW_TOKENS and seen.graph_steps == wanted
    yield case(f"{setup}: decode through graphs as configured", recipe, passed, detail)


def _equal(recipe: str, name: str, one: Observed, other: Observed) -> Case:
    if one.error or other.error:
        return case(name, recipe, False, "an engine did not run")
    differ = [
        f"{part} {i} from token {_first_difference(a, b)}"
        for part in ("alone", "batch")
        for i, (a, b) in enumerate(zip(getattr(one, part), getattr(other, part), strict=True))
        if a != b
    ]
    count = NEW_TOKENS * (len(one.alone) + len(one.batch))
    passed = not differ and len(one.batch) == BATCH
    return case(name, recipe, passed, "; ".join(differ) or f"{count} tokens equal")


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)


def _keep_log(logs: Path, recipe: str, setup: str, observed: Observed) -> None:
    (logs / f"engine-{recipe}-{setup}.log").write_text(observed.log)
