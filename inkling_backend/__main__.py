"""``python -m inkling_backend``: the command line."""

from inkling_backend.cli import main

main()
