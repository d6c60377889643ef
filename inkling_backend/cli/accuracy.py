"""The command that measures what a cache format costs a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from inkling_backend.bench import look
from inkling_backend.bench.extra import missing
from inkling_backend.bench.results import Results, Row, versions


def accuracy(
    model: Annotated[Path, typer.Option(help="Folder of a causal language model (transformers).")],
    text: Annotated[
        Path | None, typer.Option(help="UTF-8 text to read; Python's language reference if unset.")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(help="BASE[+TRANSFORM...] like nvfp4+center+rotate, repeatable."),
    ] = None,
    chunk: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 1024,
    chunks: Annotated[int, typer.Option(min=1, help="Sequences that count.")] = 4,
    needles: Annotated[bool, typer.Option(help="Look for needles in haystacks too.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Few settings, one sequence.")] = False,
    device: Annotated[
        str | None, typer.Option(help="As torch names it; the GPU by default, if there is one.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="File of results, written after every setting.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Folder for pictures (SVG).")] = None,
) -> None:
    """Measure what cache formats cost a model, settings side by side, against a BF16 cache.

    Runs the model in transformers with a simulated cache: no engine, and no GPU needed. The first
    sequence of the text only fills the pool; the next ones count. Ctrl-C keeps what is done.

    Example: inkling-backend accuracy --model ./SmolLM2-135M --json accuracy.json --plot pictures
    """
    try:
        from transformers.utils.logging import disable_progress_bar

        from inkling_backend.accuracy import settings as known
        from inkling_backend.accuracy import subject as subjects
        from inkling_backend.accuracy.measure import Work, measure

        if plot is not None:
            from inkling_backend.accuracy.plot import plot as draw
    except ModuleNotFoundError as error:
        typer.echo(missing(error, "accuracy"), err=True)
        raise typer.Exit(1) from None
    default = known.QUICK_SETTINGS if quick else known.DEFAULT_SETTINGS
    work = Work(chunk, 1 if quick else chunks)
    if not needles:
        work = Work(work.chunk, work.chunks, ())
    console, interrupted = Console(), False
    results = Results(versions(("torch", "transformers")), json)
    try:
        with look.one_line("accuracy"):
            chosen = [known.parse(name) for name in setting or default]
            disable_progress_bar()
            with console.status("reading the model"):
                subject = subjects.load(model, device)
            words = subjects.read_text(text)
            with look.progress(console) as progress:
                task = progress.add_task("accuracy", total=work.passes(chosen))
                for row in measure(subject, words, chosen, work, lambda: progress.advance(task)):
                    results.add(row)
                    console.print(_line(row), highlight=False)
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what is done follows")
    console.print(results_table(results.rows))
    if json is not None and results.rows:
        console.print(f"results in {json}")
    if plot is not None and any(row["kl"] for row in results.rows):
        for path in draw(results.rows, plot):
            console.print(f"picture in {path}")
    raise typer.Exit(look.INTERRUPTED if interrupted else 0)


def _line(row: Row) -> str:
    """One row in one line, for progress."""
    return f"{row['setting']}: KL {row['kl']:.5f}, perplexity {row['perplexity']:.3f}"


def results_table(rows: Sequence[Row]) -> Table:
    """Distance from the BF16 cache, needles found and error of the attention output."""
    heads = ("bits", "KL", "perplexity", "top-1", "needles", "attention\nerror")
    table = look.table("setting", *heads)
    for row in rows:
        table.add_row(
            row["setting"].replace("+", " +"),
            f"{row['bits']:g}",
            f"{row['kl']:.5f}",
            f"{row['perplexity']:.3f}",
            f"{row['top1']:.3f}",
            f"{row['needle']['score']:.2f}" if "needle" in row else "",
            f"{row['attention_error']['mean']:.4f}",
        )
    return table
