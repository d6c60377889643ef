"""Import-only stand-in for the engine's compiled kernels, for machines without a GPU.

The engine's CPU mode imports names from ``sgl_kernel``, whose CPU build is in no package index and
whose CUDA build needs libcuda. For the models served here it calls none of them. So every name
resolves to an object that raises when it is called, and nothing pretends to compute. The folder
above goes on the module path only where there is no GPU.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import NoReturn

__version__ = "0.0.0"


class _Missing:
    """A name of the compiled package: it can be imported and looked into, not called."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> _Missing:
        return _resolve(self.__name__, attribute)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} needs the compiled kernels; this is a stand-in")


def _resolve(owner: str, name: str) -> _Missing:
    if name.startswith("__"):
        raise AttributeError(f"{owner!r} has no attribute {name!r}")
    return _Missing(f"{owner}.{name}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every ``sgl_kernel.<anything>`` as another module of the same kind."""

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        owner = module.__name__
        vars(module)["__getattr__"] = lambda name: _resolve(owner, name)


def __getattr__(name: str) -> _Missing:
    return _resolve(__name__, name)


sys.meta_path.append(_Submodules())
