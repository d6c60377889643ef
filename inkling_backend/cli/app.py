"""Commands and how they print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.bar import Bar
from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from inkling_backend.bench import look
from inkling_backend.bench.app import app as bench
from inkling_backend.bench.extra import missing
from inkling_backend.cli import doctor as doctors
from inkling_backend.cli import plan as planner
from inkling_backend.cli.accuracy import accuracy
from inkling_backend.cli.model import read_model
from inkling_backend.formats import parse_layer_recipes
from inkling_backend.formats.layout import MOST_SINK_TOKENS

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(bench, name="bench")
app.command()(accuracy)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"{look.PROGRAM} {metadata.version(look.PROGRAM)}")
        raise typer.Exit


@app.callback()
def whole(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print and exit."),
    ] = False,
) -> None:
    """Serve language models from a block-scaled low-bit KV cache: see, plan, measure, decide.

    Example: inkling-backend doctor
    """


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check whether this machine could serve with --attention-backend inkling.

    Exit status 0 only if it could. Every no comes with the next step. Asks the engine itself, which
    takes it some seconds to load.

    Example: inkling-backend doctor
    """
    console = Console()
    if as_json:
        checks = doctors.examine()
        typer.echo(json.dumps({"checks": [check._asdict() for check in checks]}, indent=1))
    else:
        with console.status("asking torch, the GPU and the engine"):
            checks = doctors.examine()
        console.print(_doctor_table(checks))
    serves = doctors.would_serve(checks)
    if not as_json:
        bad = [check.name for check in checks if check.needed and not check.ok]
        said = (
            "This machine can serve: sglang serve --model-path MODEL --attention-backend inkling"
            if serves
            else f"This machine cannot serve yet: {', '.join(bad)}"
        )
        console.print(said, highlight=False)
    raise typer.Exit(0 if serves else look.FAILED)


def _doctor_table(checks: list[doctors.Check]) -> Table:
    table = look.table("")
    for name in ("check", "found", "next step"):
        table.add_column(name, overflow="fold", no_wrap=name == "check")
    for check in checks:
        mark = "[green]yes[/]" if check.ok else "[red]no[/]" if check.needed else "-"
        table.add_row(mark, check.name, Text(check.found), Text(check.next_step))
    return table


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Folder with the model's config.json, or the file.")],
    gpu: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(planner.GPU_MEMORY_MIB)}.")
    ] = None,
    memory_gib: Annotated[
        float | None, typer.Option(min=0, help="Memory of one GPU, instead.")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request; the model's most by default.")
    ] = None,
    mem_fraction: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Share for weights and cache, as the engine's.")
    ] = 0.88,
    weights_gib: Annotated[
        float | None,
        typer.Option(min=0, help="Size of the weights; counted from the config by default."),
    ] = None,
    layer_recipes: Annotated[
        str | None,
        typer.Option(help="LAYERS:RECIPE,... like 0-1:mxfp8: as --inkling-layer-recipes."),
    ] = None,
    sink_tokens: Annotated[
        int, typer.Option(min=0, max=MOST_SINK_TOKENS, help="As --inkling-sink-tokens.")
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how many tokens and requests fit, per recipe, against BF16 and FP8.

    Reads config.json alone: no weights, no GPU. The bytes per token are those that the pool is
    built with; weights, where they are not given, are counted in 16 bits.

    Example: inkling-backend plan --model ./Llama-3.1-8B --gpu H200 --context 32768
    """
    try:
        with look.one_line("plan"):
            memory = planner.gpu_bytes(gpu, memory_gib)
            shape = read_model(model)
            result = planner.plan(
                shape,
                memory_bytes=memory,
                tp=tp,
                context=context,
                mem_fraction=mem_fraction,
                weight_bytes=None if weights_gib is None else int(weights_gib * 2**30),
                layer_recipes=parse_layer_recipes(layer_recipes) if layer_recipes else None,
                sink_tokens=sink_tokens,
            )
    except ModuleNotFoundError as error:
        typer.echo(missing(error, "plan"), err=True)
        raise typer.Exit(look.FAILED) from None
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=1))
    else:
        gpus = "GPU" if tp == 1 else f"each of {tp} GPUs"
        Console().print(
            f"{shape.name} on {'one ' if tp == 1 else ''}{gpus}: {result.cache_bytes / 2**30:.1f} "
            f"GiB of cache beside {result.weight_bytes / 2**30:.1f} GiB of weights; requests of "
            f"{result.context:,} tokens",
            Group(_plan_table(result), _plan_chart(result)),
            sep="\n",
            highlight=False,
        )
    reasons = [f"{row.recipe}: {row.reason}" for row in result.rows if row.reason]
    for note in (*reasons, *result.notes):
        Console(stderr=True).print(f"note: {note}", highlight=False, markup=False)


def _plan_table(result: planner.Plan) -> Table:
    heads = ("bits", "bytes per\ntoken", "tokens", "requests", "of BF16", "of FP8")
    table = look.table("recipe", *heads)
    bf16, fp8 = result.row("bf16").tokens, result.row(planner.FP8).tokens
    for row in result.rows:
        cells = ["does not fit", "", "", "", ""]
        if not row.reason:
            against = [f"{row.tokens / base:.2f}x" if base else "" for base in (bf16, fp8)]
            cells = [
                f"{row.bytes_per_token:,}",
                f"{row.tokens:,}",
                f"{row.requests:,}",
                *against,
            ]
        table.add_row(row.recipe, f"{row.bits_per_element:g}", *cells)
    return table


def _plan_chart(result: planner.Plan) -> Padding:
    """A bar for each recipe, as long as its tokens."""
    most = max(row.tokens for row in result.rows) or 1
    chart = Table.grid("name", "bar", "tokens", padding=(0, 1), expand=True)
    chart.columns[1].ratio = 1
    chart.columns[2].justify = "right"
    for row in result.rows:
        chart.add_row(row.recipe, Bar(most, 0, row.tokens, color="cyan"), f"{row.tokens:,}")
    return Padding(chart, (0, 1))
