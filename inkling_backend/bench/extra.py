"""Start of a command line whose libraries are optional extras."""

from __future__ import annotations

import sys
from collections.abc import Callable

# Library -> the extra that brings it.
LIBRARIES = {
    "typer": "bench",
    "rich": "bench",
    "matplotlib": "bench",
    "transformers": "accuracy",
}


def missing(error: ModuleNotFoundError, what: str) -> str:
    """What to say of a library of the extras that is not there.

    Raises:
        ModuleNotFoundError: the given one, if its module is none of theirs.
    """
    if error.name not in LIBRARIES:
        raise error
    extra = LIBRARIES[error.name]
    return f"inkling-backend: {what} needs {error.name}: pip install 'inkling-backend[{extra}]'"


def start(load: Callable[[], Callable[[], None]]) -> None:
    """Load a command line and run it, or say what to install and end with status 1."""
    try:
        app = load()
    except ModuleNotFoundError as error:
        sys.exit(missing(error, "the command line"))
    app()
