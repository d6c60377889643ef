"""Looks into a running engine: a second plugin, put on the module path for one test only.

The engine finds it as it finds any plugin, by an entry point, so nothing of the engine or of this
package is changed. In the scheduler's process it writes what sizing computed and what the pool
allocated to a JSON file, and with every flush of the prefix cache whether page 0, which holds no
token, is as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

# Objects that can hold the pool's tensors; what else a pool refers to is not its own.
_OWNERS = (
    "inkling_backend.cache.",
    "inkling_backend.formats.",
    "inkling_backend.engines.",
    "sglang.srt.mem_cache.memory_pool",
)
_FILE = "INTEGRATION_PROBE_FILE"


def write_plugin(folder: Path, name: str, register: str) -> None:
    """Write the metadata by which the engine finds ``register`` with ``folder`` on its path."""
    module = name.replace("-", "_")
    info = folder / f"{module}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    entry = f"[sglang.srt.plugins]\n{module} = {register}\n"
    (info / "entry_points.txt").write_text(entry)


class Probe:
    """A probe whose files live in ``folder``."""

    def __init__(self, folder: Path) -> None:
        write_plugin(folder, "integration-probe", "integration.probe:register")
        self._file = folder / "pool.json"
        self.env = {_FILE: str(self._file), "PYTHONPATH": str(folder)}

    @property
    def pool(self) -> dict[str, Any]:
        """``bytes_per_token`` of sizing; ``tokens``, ``page_size`` and ``nbytes`` of the pool."""
        return self.pools[0]

    @property
    def pools(self) -> list[dict[str, Any]]:
        """The same of every pool: one for all layers, or a second one for layers with a window."""
        return json.loads(self._file.read_text())

    @property
    def draft(self) -> dict[str, Any]:
        """The same of a draft model's pool; then `pool` counts the bytes of a token in both."""
        return json.loads(_draft(self._file).read_text())[0]

    @property
    def padding_is_untouched(self) -> bool:
        """Whether page 0 had its first bytes when the prefix cache was flushed last."""
        return json.loads(_flushed(self._file).read_text())


def _flushed(file: Path) -> Path:
    return file.with_name("flushed.json")


def _draft(file: Path) -> Path:
    return file.with_name("draft.json")


_runners: list[tuple[Any, str]] = []


def register() -> None:
    """Entry point: hook the place where the engine has just allocated its pools."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.model_executor.model_runner.ModelRunner.alloc_memory_pool"
    HookRegistry.register(target, _report, HookType.AFTER)
    target = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
    HookRegistry.register(target, _compare_padding, HookType.AFTER)


def _report(result: object, runner: Any, *args: object, **kwargs: object) -> None:
    from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator

    pool = runner.token_to_kv_pool
    sizing = create_memory_pool_configurator(runner.kv_cache_configurator)
    parts, sizes = [pool], [sizing._cell_size]
    if hasattr(pool, "swa_kv_pool"):
        parts = [pool.full_kv_pool, pool.swa_kv_pool]
        sizes = [
            sizing._full_per_token * sizing._full_layers_num,
            sizing._swa_per_token * sizing._swa_layers_num,
        ]
        assert sizing._cell_size == sizes[0] + sizing._swa_full_tokens_ratio * sizes[1]
    content = [
        {
            "bytes_per_token": size,
            "tokens": part.size,
            "page_size": part.page_size,
            "nbytes": sum(_storages(part, set()).values()),
        }
        for part, size in zip(parts, sizes, strict=True)
    ]
    file = Path(os.environ[_FILE])
    (_draft(file) if runner.is_draft_worker else file).write_text(json.dumps(content))
    _runners.extend((part, _page_0(part)) for part in parts)


def _page_0(pool: Any) -> str:
    """A digest of the page's bytes in every buffer."""
    import torch

    if hasattr(pool, "pages"):
        buffers = [(each.tensor, each.bytes_per_page) for each in pool.pages.buffers()]
    else:
        slots = pool.size + pool.page_size
        buffers = [
            (each, each.nbytes // slots * pool.page_size) for each in pool.k_buffer + pool.v_buffer
        ]
    digest = hashlib.sha256()
    for tensor, size in buffers:
        digest.update(tensor.view(-1).view(torch.uint8)[:size].cpu().numpy().tobytes())
    return digest.hexdigest()


def _compare_padding(*args: object, **kwargs: object) -> None:
    same = all(_page_0(pool) == before for pool, before in _runners)
    _flushed(Path(os.environ[_FILE])).write_text(json.dumps(same))


def _storages(thing: Any, seen: set[int]) -> dict[int, int]:
    """Bytes of every tensor storage that a pool owns, by address."""
    import torch

    if id(thing) in seen:
        return {}
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    parts: list[Any] = []
    if type(thing) is dict:
        parts = list(thing.values())
    elif isinstance(thing, list | tuple):
        parts = list(thing)
    elif type(thing).__module__.startswith(_OWNERS):
        parts = list(getattr(thing, "__dict__", {}).values())
    found: dict[int, int] = {}
    for part in parts:
        found |= _storages(part, seen)
    return found
