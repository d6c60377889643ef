"""Start the engine many times, quickly, to see it refuse: one import, then a fork for each start.

    Refusals().run([{"model_path": ..., "page_size": 16, ...}])

Each start is a process of its own that runs ``python -m sglang.launch_server`` or builds
``sglang.Engine`` from the keywords, so exit status and output are what a user gets.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from integration.launch import command_line, environment

START_SECONDS = 120


@dataclass(frozen=True)
class Outcome:
    """What became of one start.

    Attributes:
        status: exit status; -9 if it was still running after `START_SECONDS`.
        output: everything it printed.
    """

    status: int
    output: str

    @property
    def error(self) -> str:
        """The last line printed: the exception, or the complaint of the argument parser."""
        lines = [line for line in self.output.splitlines() if line.strip()]
        return lines[-1] if lines else ""


class Refusals:
    """Starts engines under an environment on top of `launch.environment`."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = environment(env)

    def run(
        self,
        starts: Sequence[Mapping[str, object]],
        program: str = "launch_server",
        envs: Sequence[Mapping[str, str]] = (),
    ) -> list[Outcome]:
        """Outcomes of the starts, in order.

        Args:
            starts: keywords of ``sglang.Engine``, one mapping for each start.
            program: ``launch_server``, which gets them as flags, or ``engine``.
            envs: environment variables of each start; a PYTHONPATH goes in front of the others.
        """
        jobs = zip(starts, envs or [{}] * len(starts), strict=True)
        done = subprocess.run(
            [sys.executable, "-m", "integration.refusals", program],
            input=json.dumps(list(jobs)),
            capture_output=True,
            text=True,
            env=self._env,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"the starter failed\n{done.stdout}\n{done.stderr}")
        return [Outcome(**outcome) for outcome in json.loads(done.stdout.splitlines()[-1])]


def _start(program: str, keywords: Mapping[str, Any]) -> None:
    if program == "launch_server":
        sys.argv = ["launch_server", *command_line(keywords)]
        runpy.run_module("sglang.launch_server", run_name="__main__")
    else:
        import sglang

        sglang.Engine(**keywords)


def _forked(program: str, keywords: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, object]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setsid()
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                os.environ.update(env)
                sys.path[:0] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
                _start(program, keywords)
                status = 0
            except SystemExit as error:
                status = error.code if isinstance(error.code, int) else 1
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = _wait(child)
        output.seek(0)
        return {"status": status, "output": output.read().decode(errors="replace")}


def _wait(child: int) -> int:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _main() -> None:
    jobs = json.load(sys.stdin)
    import sglang.srt.server_args  # noqa: F401 - paid once, before the forks

    print(json.dumps([_forked(sys.argv[1], keywords, env) for keywords, env in jobs]))


if __name__ == "__main__":
    _main()
