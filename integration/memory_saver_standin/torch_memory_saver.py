"""Stand-in for the engine's memory saver, for machines without a GPU.

The real one takes the memory of a paused region away and gives back other memory. Here it stays,
and what was allocated in a region is overwritten when it is paused: whoever relies on its contents
afterwards reads NaNs. The folder goes on the module path of one test's engine only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_TAG = "kv_cache"
_LOST = 0xFF
_storages: dict[int, torch.UntypedStorage] = {}


class _Recorder(TorchDispatchMode):
    """Notes the memory of every tensor that an operator gives back."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            _storages[storage.data_ptr()] = storage
        return result


class _MemorySaver:
    enabled = True

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        with _Recorder() if tag == _TAG else nullcontext():
            yield

    def pause(self, tag: str) -> None:
        if tag == _TAG:
            for storage in _storages.values():
                torch.tensor([], dtype=torch.uint8).set_(storage).fill_(_LOST)
            print(f"memory saver: {sum(s.nbytes() for s in _storages.values())} bytes lost")

    def resume(self, tag: str) -> None:
        """Nothing to do: the memory is there, its contents are not."""


@contextmanager
def configure_subprocess() -> Iterator[None]:
    """Nothing to preload into the engine's processes."""
    yield


torch_memory_saver = _MemorySaver()
