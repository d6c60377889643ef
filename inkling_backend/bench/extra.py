"""Start of a command line whose libraries are an optional extra."""

from __future__ import annotations

import sys
from collections.abc import Callable

EXTRA = "bench"
LIBRARIES = ("typer", "rich", "matplotlib", "transformers")


def missing(error: ModuleNotFoundError, what: str) -> str:
    """What to say of a library of the extra that is not there.

    Raises:
        ModuleNotFoundError: the given one, if its module is none of theirs.
    """
    name = (error.name or "").partition(".")[0]
    if name not in LIBRARIES:
        raise error
    return f"inkling-backend: {what} needs {name}: pip install 'inkling-backend[{EXTRA}]'"


def start(load: Callable[[], Callable[[], None]]) -> None:
    """Load a command line and run it, or say what to install and end with status 1."""
    try:
        app = load()
    except ModuleNotFoundError as error:
        sys.exit(missing(error, "the command line"))
    app()
