"""A real server under load and faults, for a number of seconds.

Many streams at once ask a server whose pool is much too small. They share prefixes, hang up, abort,
lose patience and ask for what must be refused. Whatever an answer got to must be what the same
prompt gets alone; at the end no page may be missing and the padding page be as it was.

    python -m integration.soak --seconds 60 --recipe mxfp8 --json soak.json
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inkling_backend.bench.results import write_json
from integration.compare import TOP, Step, disagreements, retracted, steps_of
from integration.launch import IDLE_SECONDS, RECIPES, has_gpu, options
from integration.probe import Probe
from integration.server import Server
from integration.tiny_models import LLAMA, VOCAB, write_model

MODEL_TOKENS = 4096
MODEL = LLAMA | {"head_dim": 128, "max_position_embeddings": MODEL_TOKENS}
# A pool for some of the prompts below, and an engine that hopes for short answers: it must retract.
SERVER: dict[str, object] = {
    "skip_tokenizer_init": True,
    "page_size": 32,
    "max_total_tokens": 1024,
    "max_running_requests": 24,
    "schedule_conservativeness": 0.01,
    "chunked_prefill_size": 256,
}
ON_GPU: dict[str, object] = {
    "max_total_tokens": 8192,
    "max_running_requests": 96,
    "chunked_prefill_size": 512,
    "mem_fraction_static": 0.5,
    "cuda_graph_max_bs_decode": 96,
    "cuda_graph_backend_prefill": "disabled",
}
# Lengths of prompts: one token, one around pages and chunks, and long ones.
LENGTHS = (1, 2, 31, 32, 33, 64, 97, 255, 256, 257, 400, 700)
SHARED = 160  # tokens that every second prompt of them begins with
# More than the model has room for, alone or with an answer.
TOO_LONG = (MODEL_TOKENS - 5, MODEL_TOKENS + 1000)
NEW_TOKENS = 48
IDENTICAL = 200
# A page of the running requests is taken away now and then even where the pool would do.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "50"}

# What the engine says of a request that it must refuse, and of nothing else.
REFUSALS = (
    "input_ids cannot be empty",
    "exceeds the maximum allowed length",
    "longer than the model's context length",
    "exceeds the model's maximum context length",
)
# An exception of the engine's own, in its log for every stream of an empty prompt.
FOREIGN = "'GenerateReqInput' object has no attribute 'is_single'"
KINDS = {
    "whole": 10,
    "short": 4,
    "hung up": 4,
    "aborted": 2,
    "impatient": 2,
    "empty": 1,
    "too long": 1,
}


@dataclass
class Outcome:
    """What a soak saw.

    Attributes:
        requests: that were sent.
        faults: injected ones, and the engine's retractions, by kind.
        tokens: that were compared.
        mismatches: everything that should not have been, in words.
    """

    requests: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, object]:
        """Everything, as JSON has it."""
        return vars(self) | {"faults": dict(self.faults), "summary": self.summary()}

    def summary(self) -> str:
        """One line of figures, and the first mismatches."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        line = (
            f"{self.requests} requests, {self.faults.total()} faults injected ({kinds}), "
            f"{self.tokens} tokens compared, {len(self.mismatches)} mismatches"
        )
        return "\n".join([line, *self.mismatches[:5]])


class Soak:
    """The clients of one server.

    Args:
        exact: whether tokens must be equal; otherwise their probabilities must, up to a near tie.
            They always may differ so far for a request that was retracted: prefill then computes
            what decode had computed, by another kernel.
    """

    def __init__(self, server: Server, vocab: int, exact: bool, seed: int) -> None:
        self._server, self._exact, self._seed = server, exact, seed
        rng = random.Random(seed)
        shared = [rng.randrange(5, vocab) for _ in range(SHARED)]
        self._prompts = [
            (shared[: n // 2] if i % 2 else []) + [rng.randrange(5, vocab) for _ in range(n)]
            for i, n in enumerate(LENGTHS)
        ]
        pool = int(server.loads()["max_total_num_tokens"])
        # What the pool has no room for, if that is less.
        self._too_long = [*TOO_LONG, *([pool + 1] if pool + NEW_TOKENS < MODEL_TOKENS else [])]
        self._lock = threading.Lock()
        self.outcome = Outcome()
        self._alone = [self._ask_alone(prompt) for prompt in self._prompts]

    def run(self, seconds: float, streams: int) -> Outcome:
        """Load the server, then see that it is as it was."""
        deadline = time.monotonic() + seconds
        with ThreadPoolExecutor(streams) as pool:
            clients = [pool.submit(self._client, i, deadline) for i in range(streams)]
            for client in clients:
                client.result()
        self._check_idle()
        self._ask_identical(streams)
        for prompt, alone in zip(self._prompts, self._alone, strict=True):
            if self._ask_alone(prompt) != alone:
                self._note("an answer given alone after the load differs from the one before it")
        self._check_idle()
        return self.outcome

    def _body(self, prompt: list[int], count: int = NEW_TOKENS) -> dict[str, object]:
        params = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
        return {
            "input_ids": prompt,
            "sampling_params": params,
            "return_logprob": True,
            "top_logprobs_num": TOP,
        }

    def _note(self, what: str) -> None:
        with self._lock:
            self.outcome.mismatches.append(what)

    def _ask_alone(self, prompt: list[int]) -> list[Step]:
        self._server.flush_cache()
        *_, last = self._server.generate(self._body(prompt))
        return steps_of(last)

    def _client(self, number: int, deadline: float) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        while time.monotonic() < deadline:
            kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
            # Mostly short ones: the engine takes in many and finds no room for their answers.
            which = rng.choices(range(len(LENGTHS)), [4 if n < 100 else 1 for n in LENGTHS])[0]
            try:
                fault = self._request(rng, kind, which, f"{self._seed}-{number}-{rng.random()}")
            except (OSError, urllib.error.URLError, KeyError, ValueError) as error:
                self._note(f"{kind}: {type(error).__name__}: {error}")
                if len(self.outcome.mismatches) > 100:
                    return
                continue
            with self._lock:
                self.outcome.requests += 1
                if fault:
                    self.outcome.faults[fault] += 1

    def _request(self, rng: random.Random, kind: str, which: int, rid: str) -> str | None:
        """One request of a kind; gives the fault that it was, if it was one."""
        prompt = self._prompts[which]
        if kind in ("empty", "too long"):
            self._refused([] if kind == "empty" else [7] * rng.choice(self._too_long), kind)
            return kind
        count = NEW_TOKENS if kind == "whole" else rng.randint(1, NEW_TOKENS)
        patience = rng.uniform(0.01, 0.5) if kind == "impatient" else 120.0
        body = self._body(prompt, NEW_TOKENS if kind in ("hung up", "aborted") else count)
        stream = self._server.generate(body | {"rid": rid}, patience)
        last: dict[str, Any] = {}
        fault = None
        try:
            for i, last in enumerate(stream):
                if "error" in last:
                    self._note(f"{kind}: {last['error']}")
                    return None
                if i == count // 2 and kind == "hung up":
                    fault = kind
                    break
                if i == count // 2 and kind == "aborted":
                    self._server.abort(rid)
                    fault = kind
        except TimeoutError:
            if kind != "impatient":
                raise
            fault = kind
        finally:
            stream.close()
        self._compare(which, last, kind, whole=fault is None)
        return fault

    def _refused(self, prompt: list[int], kind: str) -> None:
        """See that a request is refused, and by the reason that it should be."""
        *_, last = self._server.generate(self._body(prompt))
        finish = last.get("meta_info", {}).get("finish_reason") or {}
        message = str(last.get("error", {}).get("message") or finish.get("message"))
        if not any(words in message for words in REFUSALS):
            self._note(f"{kind}: not refused, but {json.dumps(last)[:300]}")

    def _compare(self, which: int, last: Mapping[str, Any], kind: str, whole: bool) -> None:
        if not last:
            return
        steps = steps_of(dict(last))
        reason = (last["meta_info"]["finish_reason"] or {}).get("type")
        if whole and reason != "length":
            self._note(f"{kind}: ended by {last['meta_info']['finish_reason']}")
        # An engine pads what it aborts before the first token.
        if reason == "abort" and last["meta_info"]["completion_tokens"] < len(steps):
            return
        alone = self._alone[which][: len(steps)]
        with self._lock:
            self.outcome.tokens += len(steps)
        if self._exact and not retracted(dict(last)):
            pairs = zip(steps, alone, strict=False)
            parted = [i for i, (step, other) in enumerate(pairs) if step.token != other.token]
            if parted or len(steps) != len(alone):
                at = min(parted, default=len(alone))
                self._note(f"{kind}: prompt {which} has other tokens than alone from {at} on")
        else:
            for difference in disagreements([steps], [alone]):
                self._note(f"{kind}: prompt {which}: {difference}"[:400])

    def _ask_identical(self, streams: int) -> None:
        """One prompt many times at once gives one answer."""
        which = LENGTHS.index(33)

        def ask(_: int) -> list[int]:
            *_earlier, last = self._server.generate(self._body(self._prompts[which], 16))
            self._compare(which, last, "identical", whole=True)
            return last["output_ids"]

        with ThreadPoolExecutor(streams) as pool:
            answers = {tuple(answer) for answer in pool.map(ask, range(IDENTICAL))}
        self.outcome.requests += IDENTICAL
        if self._exact and len(answers) > 1:
            self._note(f"{IDENTICAL} identical prompts have {len(answers)} answers")

    def _check_idle(self) -> None:
        """See that the pool comes back to its start: no running request, no page in use."""
        deadline = time.monotonic() + IDLE_SECONDS
        fields = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
        while True:
            held = {name: self._server.loads()[name] for name in fields}
            if not any(held.values()):
                break
            if time.monotonic() > deadline:
                self._note(f"still held {IDLE_SECONDS} s after the last request: {held}")
                return
            time.sleep(0.2)
        self._server.flush_cache()


def soak(
    model: Path,
    recipe: str,
    seconds: float,
    streams: int,
    *,
    vocab: int = VOCAB,
    exact: bool = False,
    seed: int = 0,
    **extra: object,
) -> tuple[Outcome, str]:
    """Start a server, load it, judge it and its log; gives the outcome and the log."""
    keywords = SERVER | (ON_GPU if has_gpu() else {}) | extra
    if exact:
        keywords["enable_deterministic_inference"] = True
    with tempfile.TemporaryDirectory() as folder:
        probe = Probe(Path(folder))
        with Server(options(model, recipe, **keywords), env=probe.env | RETRACT) as server:
            clients = Soak(server, vocab, exact, seed)
            try:
                outcome = clients.run(seconds, streams)
                if not probe.padding_is_untouched:
                    outcome.mismatches.append("page 0 was written")
            except Exception as error:
                outcome = clients.outcome
                outcome.mismatches.append(f"{type(error).__name__}: {error}")
            log = server.log
    retracted = sum(map(int, re.findall(r"#retracted_reqs: (\d+)", log)))
    outcome.faults["retracted"] += retracted
    outcome.mismatches += [f"log: {line[:300]}" for line in errors_of(log)]
    return outcome, log


def errors_of(log: str) -> list[str]:
    """Exceptions and leaks that a server's log tells of."""
    pattern = r"^(?:[\w.]*(?:Error|Exception)\b:.*|.*\bleak detected.*)$"
    said = re.findall(pattern, log, re.MULTILINE)
    return [line for line in said if FOREIGN not in line]


def main() -> int:
    """Parse the command line, soak, print and write what was seen."""
    parser = argparse.ArgumentParser(
        prog="python -m integration.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--recipe", choices=RECIPES, default="mxfp8")
    parser.add_argument("--streams", type=int, help="at once (default: 32, on a GPU 128)")
    parser.add_argument("--exact", action="store_true", help="with deterministic inference")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--nccl-port", type=int, help="of the server")
    parser.add_argument("--json", type=Path, help="write the figures into this file")
    parser.add_argument("--log", type=Path, help="write the server's log into this file")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    streams = args.streams or (128 if has_gpu() else 32)
    extra = {"nccl_port": args.nccl_port} if args.nccl_port else {}
    with tempfile.TemporaryDirectory() as folder:
        outcome, log = soak(
            write_model(Path(folder) / "tiny", MODEL),
            args.recipe,
            args.seconds,
            streams,
            exact=args.exact,
            seed=args.seed,
            **extra,
        )
    print(outcome.summary())
    if args.log:
        args.log.write_text(log)
    if args.json:
        print(write_json(args.json, outcome.figures()))
    return int(bool(outcome.mismatches))


if __name__ == "__main__":
    sys.exit(main())
