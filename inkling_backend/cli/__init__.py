"""The command line: ``inkling-backend doctor | plan | accuracy | bench``."""

from __future__ import annotations

from collections.abc import Callable

from inkling_backend.bench.extra import start


def _load() -> Callable[[], None]:
    from inkling_backend.cli.app import app

    return app


def main() -> None:
    """Entry point; says what to install where the command line's libraries are missing."""
    start(_load)
