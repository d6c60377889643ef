"""``python -m inkling_backend.bench``."""

from __future__ import annotations

from collections.abc import Callable

from inkling_backend.bench.extra import start


def _load() -> Callable[[], None]:
    from inkling_backend.bench.app import app

    return app


if __name__ == "__main__":
    start(_load)
