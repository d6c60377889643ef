"""The engine with random weights: its decode step, its first token and the size of its pool."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from inkling_backend.bench.cases import ENGINE, Case, Heads
from inkling_backend.bench.results import Row
from inkling_backend.engines.sglang.flags import BACKEND, KV_CACHE_DTYPES
from inkling_backend.errors import UnknownNameError

# The engine's own backends over a BF16 cache, and their keys in a row's peers.
PEERS = {"flashinfer": "flashinfer_bf16", "fa3": "fa3_bf16"}
# Every engine takes most of a minute to start: three of them for a quick look.
QUICK_PEERS = ("flashinfer",)
QUICK_RECIPES = ("mxfp8", "nvfp4")
PROMPT_TOKENS = 8192
_SECONDS = 420
_MEASURE = "inkling_backend.engines.sglang.measure"
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception)\b")

Say = Callable[[str], None]
Emit = Callable[[Row], None]


@dataclass(frozen=True)
class Server:
    """How every engine of a run is started.

    Attributes:
        mem_fraction: share of the memory for weights and cache.
        tp: GPUs that share the model.
    """

    mem_fraction: float = 0.8
    tp: int = 1


def engine_recipes(names: list[str]) -> list[str]:
    """The recipes, all that the engine has a flag for if none is named.

    Raises:
        UnknownNameError: the engine cannot be asked for one of them.
    """
    known = tuple(dict.fromkeys(KV_CACHE_DTYPES.values()))
    for name in names:
        if name not in known:
            raise UnknownNameError("recipe of the engine", name, known)
    return names or list(known)


def write_model(folder: Path, heads: Heads) -> Path:
    """``config.json`` of a model of Llama 3.1 8B's shape with these heads; returns its folder."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": heads.q_heads,
        "num_key_value_heads": heads.kv_heads,
        "head_dim": heads.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def options(
    model: Path, backend: str, recipe: str, cases: list[Case], server: Server
) -> dict[str, object]:
    """Keywords of ``sglang.Engine``."""
    batches = sorted({case.batch for case in cases} | {1})
    chosen: dict[str, object] = {
        "model_path": str(model),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "grammar_backend": "none",
        "attention_backend": backend,
        "mem_fraction_static": server.mem_fraction,
        "tp_size": server.tp,
        "max_running_requests": batches[-1],
        "cuda_graph_bs_decode": batches,
        # Captured by default for dozens of sizes, which takes a minute and changes no decode step.
        "cuda_graph_backend_prefill": "disabled",
    }
    if backend == BACKEND:
        names = {name: dtype for dtype, name in reversed(KV_CACHE_DTYPES.items())}
        chosen["kv_cache_dtype"] = names[recipe]
        chosen["page_size"] = cases[0].heads.page_size
    return chosen


def measure(
    job: Mapping[str, object], seconds: float = _SECONDS, module: str = _MEASURE
) -> Iterator[Row]:
    """Results of one engine in a process of its own, as they come.

    Args:
        job: ``engine``, ``shapes`` and ``prompt_tokens`` as the module's documentation says.
        seconds: after which the process is ended.

    Raises:
        RuntimeError: the process failed; carries the end of its log.
    """
    with tempfile.TemporaryFile("w+", prefix="bench-engine-") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(seconds, _end, (process,))
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
            status = process.wait()
        finally:
            timer.cancel()
            _end(process)
        if status != 0:
            log.seek(0)
            lines = [text for text in log.read().splitlines() if text.strip()]
            # The engine has more to say after what it died of.
            errors = [text for text in lines if _EXCEPTION.match(text)]
            said = " | ".join(errors[-1:] or lines[-3:])
            raise RuntimeError(f"the engine ended with status {status}: {said}")


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that leads its own session, and all its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(
    cases: list[Case],
    recipes: list[str],
    server: Server,
    emit: Emit,
    say: Say,
    *,
    peers: Sequence[str],
) -> bool:
    """One engine after the other, peers first; True if every recipe was measured.

    Args:
        cases: of the operation `ENGINE`, for one model.
        server: the same for all.
        peers: those of `PEERS` to measure.
    """
    starts = [(backend, "bf16") for backend in peers]
    starts += [(BACKEND, recipe) for recipe in recipes]
    shapes = {(case.batch, case.context): case for case in cases}
    seen: dict[tuple[int, int], dict[str, float]] = {shape: {} for shape in shapes}
    passed = True
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        model = write_model(Path(folder), cases[0].heads)
        for backend, recipe in starts:
            job = {
                "engine": options(model, backend, recipe, cases, server),
                "shapes": list(shapes),
                "prompt_tokens": PROMPT_TOKENS,
            }
            try:
                for result in measure(job):
                    shape = (result["batch"], result["context"])
                    if backend in PEERS:
                        seen[shape][PEERS[backend]] = result["us"]
                    result |= {"tp": server.tp} if server.tp > 1 else {}
                    emit(_row(shapes[shape], backend, recipe, result, seen[shape]))
            except Exception as error:
                passed &= backend in PEERS
                say(f"engine with {backend} {recipe}: {error}")
    return passed


def _row(case: Case, backend: str, recipe: str, result: Row, peers: dict[str, float]) -> Row:
    row: Row = {"op": ENGINE, "format": recipe, "backend": backend, **case.facts(), **result}
    if backend == BACKEND and peers:
        row["peers"] = dict(peers)
    return row
