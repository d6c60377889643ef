"""Whether the engine of this environment can find the plugin, by metadata alone."""

from __future__ import annotations

from importlib import metadata

from inkling_backend.errors import InklingError

# The group of entry points that the engine loads, and ours among them.
ENTRY_POINTS, PLUGIN = "sglang.srt.plugins", "inkling"
REMEDY = "install this package with pip in the engine's environment"


def is_visible() -> bool:
    """Whether the plugin is installed, not only on the path."""
    return any(point.name == PLUGIN for point in metadata.entry_points(group=ENTRY_POINTS))


def require_visible() -> None:
    """Raises:
    InklingError: an engine started here would not find the plugin.
    """
    if not is_visible():
        raise InklingError(
            f"an engine started here does not find the plugin (no entry point {PLUGIN} in "
            f"{ENTRY_POINTS}): {REMEDY}"
        )
