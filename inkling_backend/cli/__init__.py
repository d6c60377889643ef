"""The command line: ``inkling-backend doctor | plan``."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; says what to install where the command line's libraries are missing."""
    try:
        from inkling_backend.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(
            f"inkling-backend: the command line needs {error.name}: "
            "pip install 'inkling-backend[bench]'"
        )
    app()
