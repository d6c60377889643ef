"""A real ``sglang serve`` process and the few HTTP calls that the tests make."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any

from integration.launch import command_line, environment, insist, stop

START_SECONDS = 240
ANSWER_SECONDS = 120
LAUNCH_SERVER = (sys.executable, "-m", "sglang.launch_server")
# What a user types; where the engine was only put on the path, there is no such program.
_PROGRAM = Path(sys.executable).with_name("sglang")
SERVE = (str(_PROGRAM), "serve") if _PROGRAM.exists() else LAUNCH_SERVER


class Server:
    """A server that answers, on a free local port.

    Args:
        options: the server's flags, as keywords of ``sglang.Engine``.
        program: the command in front of the flags.
        env: environment variables on top of `launch.environment`.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        program: Sequence[str] = SERVE,
        env: Mapping[str, str] | None = None,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.flags = command_line({**options, "host": "127.0.0.1", "port": port})
        self._log = tempfile.NamedTemporaryFile(  # noqa: SIM115 - closed by close()
            prefix="server-", suffix=".log"
        )
        self._process = subprocess.Popen(
            [*program, *self.flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment(env),
            start_new_session=True,
        )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Server:
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
        """Everything that the server has printed."""
        return Path(self._log.name).read_text(errors="replace")

    def close(self) -> None:
        """End the server and its children. Can be called twice."""
        if not self._log.closed:
            stop(self._process)
            self._log.close()

    def chat(self, question: str, **options: object) -> str:
        """The answer of ``/v1/chat/completions``."""
        with self._post("/v1/chat/completions", _chat(question, options)) as response:
            return json.load(response)["choices"][0]["message"]["content"]

    def stream(self, question: str, **options: object) -> Generator[str, None, None]:
        """The pieces of the same answer, as they come."""
        body = _chat(question, {**options, "stream": True})
        with self._post("/v1/chat/completions", body) as response:
            for line in response:
                text = line.decode().strip().removeprefix("data: ")
                if text and text != "[DONE]":
                    yield json.loads(text)["choices"][0]["delta"].get("content") or ""

    def generate(
        self, body: Mapping[str, object], timeout: float = ANSWER_SECONDS
    ) -> Generator[dict[str, Any], None, None]:
        """What ``/generate`` streams: each chunk holds everything so far. Closing it aborts.

        Args:
            body: of the request.
            timeout: seconds to wait for a chunk.

        Raises:
            TimeoutError: there was none; the request is aborted.
        """
        with self._post("/generate", {**body, "stream": True}, timeout) as response:
            for line in response:
                text = line.decode().strip().removeprefix("data: ")
                if text and text != "[DONE]":
                    yield json.loads(text)

    def abort(self, rid: str) -> None:
        """Abort the request of this id, wherever it is."""
        self._post("/abort_request", {"rid": rid}).close()

    def loads(self) -> dict[str, Any]:
        """Requests and tokens that the scheduler holds now (of its first rank)."""
        with urllib.request.urlopen(self.url + "/v1/loads", timeout=ANSWER_SECONDS) as response:
            return json.load(response)["loads"][0]

    def flush_cache(self) -> None:
        """Empty the prefix cache.

        Raises:
            TimeoutError: the server is not idle.
            urllib.error.HTTPError: it failed otherwise.
        """

        def flush() -> bool:
            try:
                self._post("/flush_cache", {}).close()
            except urllib.error.HTTPError as error:
                if error.code != HTTPStatus.BAD_REQUEST:
                    raise
                return False
            return True

        insist(flush, "flush")

    def metrics(self) -> dict[str, float]:
        """The samples of ``/metrics``: name with labels, as printed there -> value."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=ANSWER_SECONDS) as response:
            lines = response.read().decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}

    def _post(self, path: str, body: Mapping[str, object], timeout: float = ANSWER_SECONDS) -> Any:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=timeout)

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                status = self._process.returncode
                raise RuntimeError(f"the server exited with status {status}\n{self.log[-6000:]}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=10) as response:
                    if response.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        raise TimeoutError(f"no answer within {START_SECONDS} s\n{self.log[-6000:]}")


def _chat(question: str, options: Mapping[str, object]) -> dict[str, object]:
    messages = [{"role": "user", "content": question}]
    return {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 32, **options}
