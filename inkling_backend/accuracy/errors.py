"""Errors of the accuracy measurement."""

from __future__ import annotations

from inkling_backend.errors import InklingError


class AccuracyError(InklingError, ValueError):
    """A model, text or setting that cannot be measured."""
