"""The doctor and the real engine."""

from __future__ import annotations

import json
import subprocess
import sys

from integration.launch import environment, has_gpu


def run(*module: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", *module]
    return subprocess.run(command, env=environment(variables), capture_output=True, text=True)


def test_the_engine_offers_the_backend() -> None:
    done = run("inkling_backend", "doctor", "--json")
    checks = json.loads(done.stdout)["checks"]
    missing = [check["name"] for check in checks if check["needed"] and not check["ok"]]
    assert missing == ([] if has_gpu() else ["GPU"])
    assert done.returncode == (0 if has_gpu() else 1)
    assert next(check["ok"] for check in checks if check["name"] == "plugin works")


def test_an_engine_that_loads_no_plugin_is_noticed() -> None:
    done = run("inkling_backend.engines.sglang.check", SGLANG_PLUGINS="another")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "the engine did not load the plugin"
