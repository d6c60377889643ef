"""What every command looks like: its progress bar, its errors, its exit statuses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from inkling_backend.errors import InklingError

PROGRAM = "inkling-backend"
FAILED = 1
NO_GPU = 2
# What a shell says of a program that Ctrl-C ended.
INTERRUPTED = 130


def progress(console: Console) -> Progress:
    """The bar of every long job: what it does, how far it is, how long it has taken."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console)


def table(first: str, *numbers: str) -> Table:
    """The table of every command: names, which may wrap but lose nothing, and numbers beside."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column(first, overflow="fold")
    for name in numbers:
        made.add_column(name, justify="right", no_wrap=True)
    return made


@contextmanager
def one_line(command: str) -> Iterator[None]:
    """Ends a command with status 1 and one message for what a user can mend."""
    try:
        yield
    except InklingError as error:
        typer.echo(f"{PROGRAM} {command}: {error}", err=True)
        raise typer.Exit(FAILED) from None
