"""Registering with the engine, and what stops a server that would not run this plugin."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from inkling_backend.engines.sglang import patches, plugin, versions
from inkling_backend.errors import UnsupportedError

TARGET = "sglang.srt.mem_cache.allocation.get_last_loc"


class HookType(Enum):
    AFTER = "after"
    REPLACE = "replace"


class Engine:
    """As much of the engine as registering needs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hooks: dict[str, list[tuple[HookType, Callable[..., Any], Any]]] = defaultdict(list)
        self.patched: set[str] = set()
        self.backends: dict[str, Any] = {}
        self.choices: list[str] = []
        self.server_args = SimpleNamespace(
            add_attention_backend_choices=self.choices.extend,
            add_deterministic_attention_backend_choices=self.choices.extend,
            add_radix_supported_deterministic_attention_backend_choices=self.choices.extend,
        )
        registry = SimpleNamespace(_hooks=self.hooks, _patched=self.patched)
        modules = {
            "server_args": self.server_args,
            "plugins.hook_registry": SimpleNamespace(HookRegistry=registry, HookType=HookType),
            "layers.attention.attention_registry": SimpleNamespace(
                ATTENTION_BACKENDS=self.backends,
                register_attention_backend=lambda name: (
                    lambda create: self.backends.update({name: create})
                ),
            ),
        }
        for name, content in modules.items():
            module = ModuleType(f"sglang.srt.{name}")
            vars(module).update(vars(content))
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(patches, "_registered", [])
        monkeypatch.setattr(patches, "_displaced", [])
        monkeypatch.setattr(patches, "install", self._install)
        monkeypatch.setattr(plugin, "_patch_engine_keywords", lambda: None)
        monkeypatch.setattr(versions, "engine_version", lambda: "0.5.23")

    def _install(self) -> None:
        patches._registered.append(TARGET)
        self.patched.add(TARGET)

    def replace(self, target: str, name: str) -> None:
        """What another plugin does."""
        source = SimpleNamespace(plugin_name=name)
        self.hooks[target].append((HookType.REPLACE, lambda: None, source))


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins", "sglang.srt.layers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    attention = "sglang.srt.layers.attention"
    monkeypatch.setitem(sys.modules, attention, ModuleType(attention))
    return Engine(monkeypatch)


def refusal() -> str:
    with pytest.raises(UnsupportedError) as error:
        patches.verify()
    assert len(error.value.reasons) == 1
    return error.value.reasons[0]


def test_registered(engine: Engine) -> None:
    plugin.register()
    patches.verify()
    assert engine.backends == {"inkling": plugin._create}
    # A backend like any other, for deterministic inference, and there with the prefix cache.
    assert engine.choices == ["inkling"] * 3


def test_not_registered(engine: Engine) -> None:
    assert "register() of the plugin did not run" in refusal()


def test_an_engine_that_lacks_something(engine: Engine) -> None:
    module: Any = sys.modules["sglang.srt.server_args"]
    del module.add_attention_backend_choices
    with pytest.raises(UnsupportedError, match=r"SGLang 0\.5\.23.*\n.*could not be installed"):
        plugin.register()
    assert engine.backends == {}
    assert patches._registered == []


def test_a_hook_that_the_engine_could_not_apply(engine: Engine) -> None:
    plugin.register()
    engine.patched.clear()
    assert TARGET in refusal()


@pytest.mark.parametrize("version", ["0.5.16", "0.6.0", "0.6.0rc1", "1.0", "unknown"])
def test_engine_versions_that_nobody_tried(
    version: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    monkeypatch.setattr(versions, "engine_version", lambda: version)
    assert f"SGLang {version} is not supported: install 0.5.17 or newer, below 0.6" in refusal()


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23", "0.5.23.post1", "0.5.24.dev3+gabc"])
def test_engine_versions_that_may_work(
    version: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin.register()
    monkeypatch.setattr(versions, "engine_version", lambda: version)
    patches.verify()


@pytest.mark.parametrize("target", [TARGET, "sglang.srt.mem_cache.allocation"])
def test_another_plugin_in_our_place(target: str, engine: Engine) -> None:
    engine.replace(target, "rival")
    plugin.register()
    reason = refusal()
    assert f"the plugin rival replaces {target}" in reason
    assert "SGLANG_PLUGINS" in reason


def test_another_plugin_elsewhere_is_none_of_our_business(engine: Engine) -> None:
    engine.replace(TARGET + "_torch", "neighbour")
    engine.hooks[TARGET].append((HookType.AFTER, lambda: None, None))
    plugin.register()
    patches.verify()


@pytest.mark.parametrize("first", [True, False])
def test_another_backend_of_our_name(first: bool, engine: Engine) -> None:
    def create(runner: Any) -> None: ...

    if first:
        engine.backends["inkling"] = create
    plugin.register()
    if not first:
        engine.backends["inkling"] = create
    assert f"{__name__} registers a backend inkling, too" in refusal()
