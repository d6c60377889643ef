"""The real engine on two GPUs: tensor and pipeline parallel, and data-parallel attention."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from integration.compare import Step, disagreements, generate
from integration.engine import RealEngine
from integration.gpu.engines import GRAPHS, NO_PREFILL_GRAPHS
from integration.gpu.report import Case, case
from integration.gpu.watch import Watched, watch
from integration.launch import RECIPES, has_gpu, options
from integration.tiny_models import LLAMA, VOCAB, write_model

RANKS = 2
# Qwen3, as the engine's Llama cannot have data-parallel attention; heads that every kernel takes.
MODEL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 512,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
# One to four requests, so that with two data-parallel ranks one of them idles at times.
PROMPTS = [
    [(7 * i + 3 * j) % (VOCAB - 10) + 5 for i in range(n)] for j, n in enumerate((5, 300, 9))
]
NEW_TOKENS = 24
TENSOR: dict[str, object] = {"tp_size": RANKS}
PIPELINE: dict[str, object] = {"pp_size": RANKS}
DATA: dict[str, object] = {"tp_size": RANKS, "dp_size": RANKS, "enable_dp_attention": True}
# Where there are no GPUs, two ranks share the CPU over gloo.
CPU_ENV = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nonexistent"}


@dataclass
class Seen(Watched):
    """What one engine said."""

    steps: list[list[Step]] = field(default_factory=list)
    alone: list[list[Step]] = field(default_factory=list)
    bytes_per_token: int = 0


def run_parallel(folder: Path, recipes: tuple[str, ...] = RECIPES) -> Iterator[Case]:
    """One engine on one rank and two on both, for each recipe; pairs of GPUs are shared.

    Args:
        folder: where the tiny model is written.
    """
    model = write_model(folder / "tiny", LLAMA | MODEL)
    setups = {"one rank": {}, "tp 2": TENSOR, "pp 2": PIPELINE, "dp 2": DATA}
    with ThreadPoolExecutor(len(setups)) as pool:
        for number, recipe in enumerate(recipes):
            running = {
                name: pool.submit(_observe, model, recipe, extra, 10 * number + i)
                for i, (name, extra) in enumerate(setups.items())
            }
            seen = {name: future.result() for name, future in running.items()}
            yield from _cases(recipe, seen)


def _observe(model: Path, recipe: str, extra: Mapping[str, object], index: int) -> Seen:
    seen = Seen()
    keywords: dict[str, object] = {
        "skip_tokenizer_init": True,
        "max_running_requests": 8,
        "decode_log_interval": 1,
        "mem_fraction_static": 0.5,
        **(GRAPHS | NO_PREFILL_GRAPHS if has_gpu() else {}),
        **extra,
    }
    env = {"NCCL_NVLS_ENABLE": "0"} if has_gpu() else CPU_ENV if extra else None

    def ask(engine: RealEngine) -> None:
        seen.steps = generate(engine, PROMPTS, NEW_TOKENS)
        # One request: the other data-parallel rank has none.
        seen.alone = generate(engine, PROMPTS[:1], NEW_TOKENS)

    watch(seen, options(model, recipe, **keywords), ask, 32000 + 200 * index, env)
    found = re.search(r"(\d+) bytes per token", seen.log)
    seen.bytes_per_token = int(found[1]) if found else 0
    return seen


def _cases(recipe: str, seen: Mapping[str, Seen]) -> Iterator[Case]:
    single = seen["one rank"]
    for name, one in seen.items():
        if one.error:
            yield case(f"{name}: engine runs", recipe, False, one.error[-1500:])
    if single.error:
        return
    for name, one in seen.items():
        if one is single or one.error:
            continue
        differ = disagreements(one.steps, single.steps) + disagreements(one.alone, single.alone)
        detail = "; ".join(differ)[:600] or f"{NEW_TOKENS * (len(PROMPTS) + 1)} tokens agree"
        yield case(f"{name}: tokens equal one rank", recipe, not differ, detail)
        if has_gpu():
            detail = f"{one.graph_steps} of {one.decode_steps} decode steps in captured graphs"
            passed = one.graph_steps == one.decode_steps > 0
            yield case(f"{name}: decode through graphs", recipe, passed, detail)
        # Heads are split by tensor parallelism, layers by a pipeline, data-parallel attention has
        # all of both.
        share = 1 if name == "dp 2" else RANKS
        detail = f"{one.bytes_per_token} bytes per token and rank, {single.bytes_per_token} alone"
        passed = one.bytes_per_token * share == single.bytes_per_token > 0
        yield case(f"{name}: size of the cache", recipe, passed, detail)
