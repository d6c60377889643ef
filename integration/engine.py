"""A real ``sglang.Engine`` in a process of its own, driven over pipes.

The engine kills the whole process it lives in when one of its children fails, and reads its
environment at import. So every engine gets a fresh process, with its log in a file.

    with RealEngine(options(model, "mxfp8")) as engine:
        engine.generate(prompt=["Hello"], sampling_params={"temperature": 0})
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from integration.launch import environment, insist, stop

SHUTDOWN_SECONDS = 10


class EngineFailed(RuntimeError):
    """The engine's process ended; carries the end of its log."""


class RealEngine:
    """A started engine.

    Args:
        options: keywords of ``sglang.Engine``.
        env: environment variables on top of `launch.environment`.
        seconds: it is ended after these; None for never.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        env: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> None:
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed by close()
            prefix="engine-", suffix=".log"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "integration.engine", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment(env),
            start_new_session=True,
        )
        self._limit = threading.Timer(seconds or threading.TIMEOUT_MAX, stop, [self._process])
        self._limit.daemon = True
        if seconds is not None:
            self._limit.start()
        try:
            self._read()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RealEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def log(self) -> str:
        """Everything that the engine's processes have printed."""
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        """End the engine and its children. Can be called twice."""
        if self._log.closed:
            return
        self._limit.cancel()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                pipe.close()
        # Without an input the process shuts its engine down, which SIGTERM does not make it do.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(SHUTDOWN_SECONDS)
        stop(self._process)
        self._log.close()

    def call(self, method: str, **arguments: object) -> Any:
        """The result of a method of the engine, or of one of the functions in `_EXTRA`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the read below reports why
        return self._read()

    def generate(self, **arguments: object) -> Any:
        """``sglang.Engine.generate``; greedy where the arguments say nothing else."""
        arguments.setdefault("sampling_params", {})
        params = arguments["sampling_params"]
        assert isinstance(params, dict)
        params.setdefault("temperature", 0)
        return self.call("generate", **arguments)

    def tokens(self, input_ids: list[list[int]], count: int) -> list[list[int]]:
        """Exactly ``count`` greedy tokens after each of the given prompts, as one batch."""
        answers = self.generate(
            input_ids=input_ids, sampling_params={"max_new_tokens": count, "ignore_eos": True}
        )
        return [answer["output_ids"] for answer in answers]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        return self.call("encode", text=text)

    def ask(self, question: str, count: int = 32) -> str:
        """The model's greedy answer to a chat message."""
        prompt = self.call("chat_prompt", question=question)
        return self.generate(prompt=prompt, sampling_params={"max_new_tokens": count})["text"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait(30)
            raise EngineFailed(f"the engine exited with status {status}\n{self.log[-6000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(f"{reply['error']}\n{self.log[-6000:]}")
        return reply["result"]


def _encode(engine: Any, text: str) -> list[int]:
    return engine.tokenizer_manager.tokenizer.encode(text)


def _chat_prompt(engine: Any, question: str) -> str:
    messages = [{"role": "user", "content": question}]
    tokenizer = engine.tokenizer_manager.tokenizer
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _flush_cache(engine: Any) -> None:
    insist(lambda: engine.flush_cache().success, "flush")


def _update_weights_from_file(engine: Any, file: str) -> tuple[bool, str]:
    from safetensors.torch import load_file

    tensors = list(load_file(file).items())
    engine.begin_weight_update()
    try:
        return engine.update_weights_from_tensor(tensors)
    finally:
        engine.end_weight_update()


_EXTRA: dict[str, Callable[..., Any]] = {
    "encode": _encode,
    "chat_prompt": _chat_prompt,
    "flush_cache": _flush_cache,
    "update_weights_from_file": _update_weights_from_file,
}


def _serve() -> None:
    """Body of the engine's process: one JSON request a line on stdin, one reply a line."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the engine prints belongs to the log

    def reply(**content: object) -> None:
        replies.write(json.dumps(content, default=str) + "\n")
        replies.flush()

    import sglang

    engine = sglang.Engine(**json.loads(sys.argv[1]))
    reply(result="ready")
    for line in sys.stdin:
        request = json.loads(line)
        method, arguments = request["method"], request["arguments"]
        try:
            if method in _EXTRA:
                reply(result=_EXTRA[method](engine, **arguments))
            else:
                reply(result=getattr(engine, method)(**arguments))
        except Exception as error:
            reply(error=f"{type(error).__name__}: {error}")
    engine.shutdown()


if __name__ == "__main__":
    _serve()
