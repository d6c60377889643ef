"""Entry point of the SGLang plugin, called in every process of the engine."""

from __future__ import annotations

import functools
import multiprocessing
import sys
from typing import Any

from inkling_backend.engines.sglang import patches, versions
from inkling_backend.engines.sglang.flags import BACKEND
from inkling_backend.errors import UnsupportedError


def register() -> None:
    """Register the attention backend, its options and its hooks with the engine.

    The engine logs and swallows exceptions of plugins: if this fails, ``inkling`` is no choice of
    ``--attention-backend`` and the engine refuses the name.

    Raises:
        UnsupportedError: the engine lacks what the plugin stands on.
    """
    try:
        _register()
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UnsupportedError(
            f"SGLang {versions.engine_version()}", [patches.not_installed(what)]
        ) from error


def _register() -> None:
    from sglang.srt.server_args import (
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )

    patches.install()
    _patch_engine_keywords()
    patches.claim(_create)
    add_attention_backend_choices([BACKEND])
    # No result of ours depends on the batch, on chunks or on the prefix cache.
    add_deterministic_attention_backend_choices([BACKEND])
    add_radix_supported_deterministic_attention_backend_choices([BACKEND])


def _create(model_runner: Any) -> Any:
    """The backend of one model runner."""
    patches.verify()
    from inkling_backend.engines.sglang.backend import InklingAttnBackend

    return InklingAttnBackend(model_runner)


def _patch_engine_keywords() -> None:
    """Let ``sglang.Engine(...)`` take the backend's options (see the note in patches.py).

    Only the process that a user calls can construct an Engine; a scheduler process that has not
    imported it is spared the import.
    """
    module = "sglang.srt.entrypoints.engine"
    if module not in sys.modules and multiprocessing.parent_process() is not None:
        return
    from sglang.srt.entrypoints.engine import Engine

    server_args_class = Engine.server_args_class
    Engine.server_args_class = staticmethod(
        functools.partial(patches.build_server_args, server_args_class)
    )
