"""Commands and how they print: tables for people, JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from inkling_backend.bench.app import app as bench
from inkling_backend.cli import doctor as doctors
from inkling_backend.cli import plan as planner
from inkling_backend.cli.accuracy import accuracy
from inkling_backend.errors import InklingError

app = typer.Typer(
    help="Serve language models from a block-scaled low-bit KV cache: see, plan, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.command()(accuracy)
_BAR = 12


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check whether this machine could serve with --attention-backend inkling.

    Exit status 0 only if it could. Every no comes with the next step.

    Example: inkling-backend doctor
    """
    checks = doctors.examine()
    if as_json:
        typer.echo(json.dumps({"checks": [check._asdict() for check in checks]}, indent=1))
    else:
        table = Table("", "check", "found", "next step")
        for check in checks:
            mark = "[green]yes[/]" if check.ok else "[red]no[/]" if check.needed else "-"
            table.add_row(mark, check.name, check.found, check.next_step)
        Console().print(table)
    raise typer.Exit(0 if doctors.would_serve(checks) else 1)


@app.command()
def plan(
    model: Annotated[Path, typer.Option(help="Folder with the model's config.json, or the file.")],
    gpu: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(planner.GPU_MEMORY_MIB)}.")
    ] = None,
    memory_gib: Annotated[float | None, typer.Option(help="Memory of one GPU, instead.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a request; the model's most by default.")
    ] = None,
    mem_fraction: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Share for weights and cache, as the engine's.")
    ] = 0.88,
    weights_gib: Annotated[
        float | None, typer.Option(help="Size of the weights; counted from the config by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Say how many tokens and requests fit, per recipe, against BF16 and FP8.

    Reads config.json alone: no weights, no GPU.

    Example: inkling-backend plan --model ./Llama-3.1-8B --gpu H200 --context 32768
    """
    try:
        shape = planner.read_model(model)
        memory = planner.gpu_bytes(gpu, memory_gib)
        result = planner.plan(
            shape,
            memory_bytes=memory,
            tp=tp,
            context=context,
            mem_fraction=mem_fraction,
            weight_bytes=None if weights_gib is None else int(weights_gib * 2**30),
        )
    except InklingError as error:
        typer.echo(f"inkling-backend plan: {error}", err=True)
        raise typer.Exit(1) from None
    if as_json:
        typer.echo(json.dumps(result.as_json(), indent=1))
        return
    table = Table("recipe", "bits", "bytes per token", "tokens", "requests", "against BF16")
    most = max(row.tokens for row in result.rows) or 1
    base = result.row("bf16").tokens or 1
    for row in result.rows:
        if row.reason:
            table.add_row(row.recipe, "", "", "", "", row.reason)
            continue
        bar = "█" * max(1, round(_BAR * row.tokens / most))
        table.add_row(
            row.recipe,
            f"{row.bits_per_element:g}",
            f"{row.bytes_per_token:,}",
            f"{row.tokens:,}",
            f"{row.requests:,}",
            f"{row.tokens / base:.2f}x {bar}",
        )
    console = Console()
    console.print(
        f"{shape.name}: {result.cache_bytes / 2**30:.1f} GiB for the cache of each of {tp} GPU(s), "
        f"after {result.weight_bytes / 2**30:.1f} GiB of weights; requests of {result.context:,} "
        f"tokens"
    )
    console.print(table)
