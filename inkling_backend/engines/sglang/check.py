"""Whether the engine of this environment offers the backend.

``python -m inkling_backend.engines.sglang.check`` loads the engine's plugins as the engine does,
and ends with status 0 if all of this one's hooks are in place. Otherwise the last line that it
prints says why. It is a process of its own because the hooks stay.
"""

from __future__ import annotations

import logging
import sys

import torch

from inkling_backend.engines.sglang.flags import BACKEND
from inkling_backend.errors import InklingError


def offer() -> None:
    """Load the plugins of this process.

    Raises:
        InklingError: the backend is no choice, or a hook is missing.
        ImportError: the engine, or its kernels on a GPU, cannot be imported.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES

    from inkling_backend.engines.sglang import patches

    if BACKEND not in ATTENTION_BACKEND_CHOICES:
        raise InklingError("the engine did not load the plugin")
    patches.verify()
    if torch.cuda.is_available():
        import sgl_kernel  # noqa: F401


def main() -> None:
    """Print why not, if not, and end with the right status."""
    logging.disable(logging.INFO)
    try:
        offer()
    except InklingError as error:
        sys.exit(str(error).replace("\n", " "))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}".replace("\n", " "))


if __name__ == "__main__":
    main()
