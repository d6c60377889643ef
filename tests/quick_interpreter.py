"""Triton's interpreter, without what it does anew at every call and need do once.

At each launch, and at each call of one `triton.jit` function by another, it searches all of
``triton.language`` for functions to replace, which takes longer than the calls themselves. Here
they are found once, by its own code, and replaced once a launch. What a kernel computes is
untouched.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def quicken() -> None:
    """Change the interpreter of this process. Once is enough."""
    import triton.language as tl
    from triton.runtime import interpreter

    _patch_once_a_launch(interpreter, tl)
    interpreter._get_np_dtype = _cached_by_name(interpreter._get_np_dtype)


def _patch_once_a_launch(interpreter: Any, tl: Any) -> None:
    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    scope = interpreter._patch_lang(everything)
    found = [(thing, name, vars(thing)[name]) for thing, name, _ in scope._changes]
    scope.restore()

    def patch_lang(function: object) -> Any:
        if not scope._changes:  # else a launch is under way, and it restores them
            for change in found:
                scope.set_attr(*change)
        return scope

    interpreter._patch_lang = patch_lang


def _cached_by_name(np_dtype: Any) -> Any:
    found: dict[str, Any] = {}

    def cached(dtype: Any) -> Any:
        scalar = dtype.element_ty if dtype.is_block() else dtype
        if scalar.name not in found:
            found[scalar.name] = np_dtype(scalar)
        return found[scalar.name]

    return cached
