"""The real engine on the GPU with drafts: of the model itself in every recipe, and of n-grams."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from integration.drafting import gaps, speculate
from integration.engine import RealEngine
from integration.gpu.engines import BATCH, EAGER, NEW_TOKENS, SETUPS, SHARED, STORY
from integration.gpu.report import Case, case
from integration.gpu.watch import Watched, watch
from integration.launch import RECIPES, options

STEPS = 4
# SmolLM2's logits are below 32, where a unit in the last place of bfloat16 is 2**-3; a prompt and a
# verification are computed by other kernels, of the model's matrix products, too.
NEAR = 4 * 2**-3
# As on a CPU, `integration/test_speculation.py`, with one step more.
ACCEPTED = 0.4
# Drafting and verifying in captured graphs.
GRAPHS = SETUPS["graphs"]


@dataclass
class Observed(Watched):
    """What one engine said."""

    alone: list[list[int]] = field(default_factory=list)
    accepted: float = 0.0
    behind: float = float("inf")
    draft_graphs: bool = False
    hit_equals_miss: bool = False


def run_drafts(model: Path, logs: Path) -> Iterator[Case]:
    """A case for each thing that each engine shows."""
    starts = [(recipe, "graphs", GRAPHS) for recipe in RECIPES] + [("mxfp8", "eager", EAGER)]
    starts += [(recipe, "ngram", GRAPHS) for recipe in ("mxfp8", "nvfp4")]
    with ThreadPoolExecutor(len(starts)) as pool:
        running = {
            (recipe, setup): pool.submit(_observe, model, recipe, setup, extra, index)
            for index, (recipe, setup, extra) in enumerate(starts)
        }
        for (recipe, setup), future in running.items():
            seen = future.result()
            (logs / f"drafts-{recipe}-{setup}.log").write_text(seen.log)
            yield from _cases_of(recipe, setup, seen)
        graphs, eager = (running["mxfp8", setup].result() for setup in ("graphs", "eager"))
        equal = graphs.alone == eager.alone and bool(graphs.alone)
        yield case("drafts: graphs equal eager", "mxfp8", equal, f"{len(graphs.alone)} answers")


def _observe(
    model: Path, recipe: str, setup: str, extra: Mapping[str, object], index: int
) -> Observed:
    seen = Observed()
    drafts: dict[str, object] = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(model),
        "speculative_num_steps": STEPS,
    }
    if setup == "ngram":
        drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}
        drafts["speculative_ngram_max_bfs_breadth"] = 1
    keywords = options(model, recipe, **{**SHARED, **drafts, **extra})
    watch(seen, keywords, lambda engine: _ask(engine, seen), 36000 + 200 * index)
    seen.draft_graphs = "Capture draft decode CUDA graph end" in seen.log
    return seen


def _ask(engine: RealEngine, seen: Observed) -> None:
    story = engine.encode(STORY)
    prompts = [(story * 60)[: 3 + 149 * i] for i in range(BATCH)]  # 3 to 1046 tokens
    for each in (prompts[0], prompts[3], prompts[-1]):
        engine.call("flush_cache")
        seen.alone += speculate(engine, [each], NEW_TOKENS).tokens
    (again,) = speculate(engine, [prompts[-1]], NEW_TOKENS).tokens
    seen.hit_equals_miss = again == seen.alone[-1]
    engine.call("flush_cache")
    said = speculate(engine, prompts, NEW_TOKENS)
    said = speculate(engine, prompts, NEW_TOKENS)  # n-grams draft what was said
    seen.accepted = said.accepted
    seen.behind = max(gaps(engine, prompts, said.tokens))


def _cases_of(recipe: str, setup: str, seen: Observed) -> Iterator[Case]:
    name = f"drafts, {setup}"
    if seen.error:
        yield case(f"{name}: engine runs", recipe, False, seen.error[-1500:])
        return
    own, draft = "KV cache recipe", "draft model, KV cache recipe"
    wanted = [own] if setup == "ngram" else [own, draft]
    caches = len(seen.cache_lines) == len(wanted) and all(
        map(str.__contains__, seen.cache_lines, wanted)
    )
    yield case(f"{name}: caches", recipe, caches, f"{seen.seconds:.0f} s; {seen.cache_lines}")
    detail = f"at most {seen.behind:.3f} nats behind the likeliest token, {NEAR} allowed"
    yield case(f"{name}: no token changed", recipe, seen.behind <= NEAR, detail)
    detail = f"{seen.accepted:.0%} of the drafted tokens"
    yield case(f"{name}: accepted", recipe, seen.accepted > ACCEPTED, detail)
    detail = f"equal tokens: {seen.hit_equals_miss}"
    yield case(f"{name}: prefix hit equals miss", recipe, seen.hit_equals_miss, detail)
    steps = 0 if setup == "eager" else seen.decode_steps
    passed = seen.decode_steps > 0 and seen.graph_steps == steps
    detail = f"{seen.graph_steps} of {seen.decode_steps} verifications in captured graphs"
    passed = passed and seen.draft_graphs == (setup == "graphs")
    detail += f", drafting captured: {seen.draft_graphs}"
    yield case(f"{name}: graphs as configured", recipe, passed, detail)
