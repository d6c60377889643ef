"""Commands of the benchmark: ``decode``, ``verify``, ``extend``, ``store``, ``engine``, ``compare``
and ``plot``."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inkling_backend.bench import cases as shapes
from inkling_backend.bench import compare as comparing
from inkling_backend.bench import table
from inkling_backend.bench.cases import Case, Heads
from inkling_backend.bench.extra import missing
from inkling_backend.bench.results import LIBRARIES, Results, Row, gpu, read, versions
from inkling_backend.env import Extend
from inkling_backend.errors import InklingError
from inkling_backend.formats import get_recipe

app = typer.Typer(
    help="Measure what the engine runs, beside the attention libraries found on this host.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Formats = Annotated[
    list[str] | None,
    typer.Option("--format", help=f"Recipe, repeatable; {', '.join(shapes.RECIPE_NAMES)}."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="BATCHxCONTEXT like 64x8k, repeatable."),
]
QHeads = Annotated[int, typer.Option(min=1, help="Query heads of the model.")]
KVHeads = Annotated[int, typer.Option(min=1, help="KV heads of the model.")]
HeadDim = Annotated[int, typer.Option(min=1, help="head_dim of the model.")]
PageSize = Annotated[int, typer.Option(help="Tokens of a page.")]
Ragged = Annotated[
    bool, typer.Option("--ragged", help="Lengths spread 1:100, with the same total.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Few shapes and recipes.")]
WithPeers = Annotated[bool, typer.Option(help="Measure other libraries found on this host too.")]
Sustained = Annotated[
    float, typer.Option(min=0, help="Seconds of replays back to back; 0 leaves it out.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="File of results, written after every row.")
]
Emit = Callable[[Row], None]
Say = Callable[[str], None]
_HEADS = Heads()


@dataclass(frozen=True)
class Run:
    """What the measuring commands share."""

    op: str
    heads: Heads
    formats: list[str] | None
    shapes: list[str] | None
    quick: bool
    peers: bool
    json: Path | None

    @property
    def command(self) -> str:
        """Name of the command."""
        return self.op.removesuffix("_decode")

    def cases(self, **more: int | bool) -> list[Case]:
        """The cases asked for; ``more`` goes to `make_case`."""
        default = shapes.QUICK_SHAPES if self.quick else shapes.SHAPES
        texts = self.shapes or default[self.op]
        return [shapes.make_case(self.op, text, self.heads, **more) for text in texts]  # type: ignore[arg-type]

    def recipe_names(self) -> list[str]:
        """The recipes asked for."""
        default = shapes.QUICK_RECIPES if self.quick else shapes.RECIPE_NAMES
        return list(self.formats or default)


@app.command()
def decode(
    formats: Formats = None,
    shape: Shapes = None,
    q_heads: QHeads = _HEADS.q_heads,
    kv_heads: KVHeads = _HEADS.kv_heads,
    head_dim: HeadDim = _HEADS.head_dim,
    page_size: PageSize = _HEADS.page_size,
    ragged: Ragged = False,
    store: Annotated[
        bool, typer.Option("--store", help="Store K and V of the new tokens in the time too.")
    ] = False,
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """One new token per request.

    Example: inkling-backend bench decode --json decode.json
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.DECODE, heads, formats, shape, quick, peers, json)
    _kernels(run, sustained, ragged=ragged, store=store)


@app.command()
def verify(
    formats: Formats = None,
    shape: Shapes = None,
    q_heads: QHeads = _HEADS.q_heads,
    kv_heads: KVHeads = _HEADS.kv_heads,
    head_dim: HeadDim = _HEADS.head_dim,
    page_size: PageSize = _HEADS.page_size,
    query_tokens: Annotated[int, typer.Option(min=1, help="Query tokens per request.")] = 4,
    ragged: Ragged = False,
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """A few query tokens per request over a long context.

    Example: inkling-backend bench verify --query-tokens 8
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.VERIFY, heads, formats, shape, quick, peers, json)
    _kernels(run, sustained, query_tokens=query_tokens, ragged=ragged)


@app.command()
def extend(
    formats: Formats = None,
    shape: Annotated[
        list[str] | None,
        typer.Option("--shape", help="BATCHxNEW or BATCHxNEW+PREFIX like 1x2k+32k, repeatable."),
    ] = None,
    q_heads: QHeads = _HEADS.q_heads,
    kv_heads: KVHeads = _HEADS.kv_heads,
    head_dim: HeadDim = _HEADS.head_dim,
    page_size: PageSize = _HEADS.page_size,
    extend: Annotated[
        Extend | None,
        typer.Option("--extend", help="What attends; unset means $INKLING_EXTEND, or auto."),
    ] = None,
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """Prefill: many new tokens, after a cached prefix or none.

    Example: inkling-backend bench extend --shape 1x2k+32k --extend flashinfer
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.EXTEND, heads, formats, shape, quick, peers, json)
    _kernels(run, sustained, extend)


@app.command()
def store(
    formats: Formats = None,
    shape: Annotated[
        list[str] | None, typer.Option("--shape", help="Tokens to store, like 256 or 8k.")
    ] = None,
    q_heads: QHeads = _HEADS.q_heads,
    kv_heads: KVHeads = _HEADS.kv_heads,
    head_dim: HeadDim = _HEADS.head_dim,
    page_size: PageSize = _HEADS.page_size,
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """Quantize K, V and Q, and write K and V into their pages.

    Example: inkling-backend bench store --shape 8k
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    _kernels(Run(shapes.STORE, heads, formats, shape, quick, peers, json), sustained)


@app.command()
def engine(
    formats: Formats = None,
    shape: Shapes = None,
    q_heads: QHeads = _HEADS.q_heads,
    kv_heads: KVHeads = _HEADS.kv_heads,
    head_dim: HeadDim = _HEADS.head_dim,
    page_size: PageSize = _HEADS.page_size,
    mem_fraction: Annotated[
        float, typer.Option(min=0.1, max=1.0, help="Share of the memory for weights and cache.")
    ] = 0.8,
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model.")] = 1,
    quick: Quick = False,
    peers: WithPeers = True,
    json: JsonFile = None,
) -> None:
    """SGLang with random weights of Llama 3.1 8B's shape: decode step, first token, KV tokens.

    Example: inkling-backend bench engine --format nvfp4
    """
    from inkling_backend.bench import engine as engines

    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.ENGINE, heads, formats, shape, quick, peers, json)
    with _one_line(run.command):
        names = list(formats or (shapes.QUICK_RECIPES if quick else ()))
        recipes, cases = engines.engine_recipes(names), run.cases()
    starts = len(recipes) + (len(engines.PEERS) if peers else 0)

    def work(emit: Emit, say: Say) -> bool:
        server = engines.Server(mem_fraction, tp)
        return engines.run(cases, recipes, server, emit, say, peers=peers)

    _finish(run, starts * len(cases), work)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="File of results.")],
    after: Annotated[Path, typer.Argument(help="File of results to compare with it.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Percent that a row may get slower.")] = 5,
) -> None:
    """Compare two files row by row; status 1 if a row got slower.

    Example: inkling-backend bench compare old.json new.json
    """
    with _one_line("compare"):
        result = comparing.compare(read(before), read(after))
    console = Console()
    console.print(table.comparison_table(result, tolerance / 100))
    for path, names in ((before, result.only_before), (after, result.only_after)):
        for name in names:
            console.print(f"only in {path.name}: {name}")
    if not result.pairs:
        typer.echo("inkling-backend bench compare: no row is in both files", err=True)
    raise typer.Exit(0 if result.passed(tolerance / 100) else 1)


@app.command()
def plot(
    files: Annotated[list[Path], typer.Argument(help="Files of results.")],
    out: Annotated[Path, typer.Option(help="Folder of the pictures.")] = Path(),
) -> None:
    """Draw files of results as SVG.

    Example: inkling-backend bench plot decode.json --out pictures
    """
    try:
        from inkling_backend.bench.plot import plot as draw
    except ModuleNotFoundError as error:
        typer.echo(missing(error, "plot"), err=True)
        raise typer.Exit(1) from None
    with _one_line("plot"):
        contents = [read(path) for path in files]
    for path in draw(contents, out):
        typer.echo(path)


@contextmanager
def _one_line(command: str) -> Iterator[None]:
    """Ends a command with status 1 and one line for what a user can mend."""
    try:
        yield
    except InklingError as error:
        typer.echo(f"inkling-backend bench {command}: {error}", err=True)
        raise typer.Exit(1) from None


def _kernels(run: Run, sustained: float, extend: Extend | None = None, **more: int | bool) -> None:
    """Measure an operation of `AttentionRunner`."""
    with _one_line(run.command):
        cases = run.cases(**more)
        recipes = [get_recipe(name) for name in run.recipe_names()]

    def work(emit: Emit, say: Say) -> bool:
        from inkling_backend.bench.data import Lab
        from inkling_backend.bench.run import Bench
        from inkling_backend.bench.timing import GraphMeter

        torch.manual_seed(0)
        device = torch.device("cuda", torch.cuda.current_device())
        lab = Lab(run.heads, device, extend=extend)
        bench = Bench(lab, GraphMeter(sustained), say, with_peers=run.peers)
        return bench.run(cases, recipes, emit)

    _finish(run, len(cases) * len(recipes), work)


def _finish(run: Run, count: int, work: Callable[[Emit, Say], bool]) -> None:
    """Run ``work`` under a progress bar, print the table, end with the right status."""
    if not torch.cuda.is_available():
        typer.echo(
            f"inkling-backend bench {run.command}: no CUDA GPU found, and nothing else is "
            "measured: run it on a machine with one (compare and plot work anywhere)",
            err=True,
        )
        raise typer.Exit(2)
    results = Results(_host(), run.json)
    console, errors = Console(), Console(stderr=True)
    columns = (TextColumn(run.op), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(run.op, total=count)

        def emit(row: Row) -> None:
            results.add(row)
            progress.advance(task)
            progress.console.print(table.line(row))

        def say(text: str) -> None:
            errors.print(text, markup=False, highlight=False)

        passed = work(emit, say)
    draw = table.engine_table if run.op == shapes.ENGINE else table.results_table
    console.print(draw(results.rows))
    if run.json is not None:
        console.print(f"results in {run.json}")
    raise typer.Exit(0 if passed else 1)


def _host() -> dict[str, str]:
    try:
        facts = gpu()
    except (OSError, subprocess.CalledProcessError):
        facts = {"gpu": torch.cuda.get_device_name()}
    return {**facts, **versions(LIBRARIES)}
