"""Every exception that a user of this package can see.

A message names the thing, what was expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Sequence


class InklingError(Exception):
    """Base class of this package's errors."""


class InvalidTensorError(InklingError, ValueError):
    """A tensor argument has the wrong shape, dtype, device or strides."""

    def __init__(self, name: str, what: str, expected: object, got: object) -> None:
        super().__init__(f"{name}: expected {what} {expected}, got {got}")


class UnknownNameError(InklingError, ValueError):
    """A format, recipe or option name that does not exist."""

    def __init__(self, kind: str, name: object, known: Sequence[str]) -> None:
        super().__init__(f"unknown {kind} {name!r}; known: {', '.join(known)}")


class LayerRecipesError(InklingError, ValueError):
    """A text that gives layers recipes of their own cannot be read."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(f"layer recipes {text!r}: {what}")


class UnsupportedError(InklingError, RuntimeError):
    """A configuration that cannot be served; carries every reason at once.

    Attributes:
        reasons: one sentence each, saying what is wrong and what to do instead.
    """

    def __init__(self, subject: str, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        lines = "".join(f"\n  - {reason}" for reason in self.reasons)
        super().__init__(f"{subject} cannot be served by the inkling attention backend:{lines}")


class EnvironmentVariableError(InklingError, ValueError):
    """An INKLING_* environment variable holds a value that is not allowed."""

    def __init__(self, name: str, got: str, allowed: Sequence[str]) -> None:
        super().__init__(f"environment variable {name}={got!r}: allowed are {', '.join(allowed)}")
