"""Commands of the benchmark: ``decode``, ``verify``, ``extend``, ``store``, ``engine``, ``compare``
and ``plot``; ``--quick`` alone runs the first four."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console
from rich.table import Table

from inkling_backend.bench import cases as shapes
from inkling_backend.bench import compare as comparing
from inkling_backend.bench import look, table
from inkling_backend.bench.cases import Case, Heads
from inkling_backend.bench.extra import missing
from inkling_backend.bench.results import LIBRARIES, Results, Row, gpu, read, versions
from inkling_backend.env import Extend
from inkling_backend.formats import Recipe

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help=f"Recipe, repeatable; {', '.join(shapes.RECIPE_NAMES)}. With +center or +rotate "
        "behind it, or both: keys under that transform.",
    ),
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
QueryDtype = Annotated[
    Literal["auto", "mxfp8"],
    typer.Option(help="mxfp8: quantize queries too, in recipes with K in MXFP8."),
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
Work = Callable[[Emit, Say], bool]
_HEADS = Heads()
_VERIFY_TOKENS = 4
# Seconds of replays back to back for each row of the tour.
_TOUR_SUSTAINED = 0.2


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
    query_dtype: str = "auto"

    @property
    def command(self) -> str:
        """Name of the command."""
        return self.op.removesuffix("_decode")

    def cases(self, **more: int | bool) -> list[Case]:
        """The cases asked for; ``more`` goes to `make_case`."""
        default = shapes.QUICK_SHAPES if self.quick else shapes.SHAPES
        texts = self.shapes or default[self.op]
        return [shapes.make_case(self.op, text, self.heads, **more) for text in texts]  # type: ignore[arg-type]

    def recipes(self) -> list[Recipe]:
        """The recipes asked for, with their queries."""
        default = shapes.QUICK_RECIPES if self.quick else shapes.RECIPE_NAMES
        found = [shapes.parse_recipe(name)[0] for name in self.formats or default]
        return [r.with_mxfp8_query() for r in found] if self.query_dtype == "mxfp8" else found


@app.callback(invoke_without_command=True)
def tour(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Decode, verify, extend and store in under 3 minutes.")
    ] = False,
    json: JsonFile = None,
) -> None:
    """Measure what the engine runs, beside the attention libraries found on this host.

    Every row is compared with the float32 reference before it is timed. Ctrl-C keeps what is done.

    Example: inkling-backend bench --quick --json quick.json
    """
    if context.invoked_subcommand is not None:
        if quick or json is not None:
            raise typer.BadParameter(f"give options after the command {context.invoked_subcommand}")
        return
    if not quick:
        raise typer.BadParameter("give a command, or --quick")
    runs = [
        Run(op, _HEADS, None, None, quick=True, peers=True, json=json)
        for op in (shapes.DECODE, shapes.VERIFY, shapes.EXTEND, shapes.STORE)
    ]
    more = {shapes.VERIFY: {"query_tokens": _VERIFY_TOKENS}}
    groups = [run.cases(**more.get(run.op, {})) for run in runs]
    recipes = runs[0].recipes()
    count = sum(map(len, groups)) * len(recipes)
    work = _kernel_work(groups, recipes, _HEADS, _TOUR_SUSTAINED, peers=True)
    _finish("bench", json, count, table.results_table, work)


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
    query_dtype: QueryDtype = "auto",
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """One new token per request.

    Example: inkling-backend bench decode --json decode.json
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.DECODE, heads, formats, shape, quick, peers, json, query_dtype)
    _kernels(run, sustained, ragged=ragged, store=store)


@app.command()
def verify(
    formats: Formats = None,
    shape: Shapes = None,
    q_heads: QHeads = _HEADS.q_heads,
    kv_heads: KVHeads = _HEADS.kv_heads,
    head_dim: HeadDim = _HEADS.head_dim,
    page_size: PageSize = _HEADS.page_size,
    query_tokens: Annotated[
        int, typer.Option(min=1, help="Query tokens per request.")
    ] = _VERIFY_TOKENS,
    ragged: Ragged = False,
    query_dtype: QueryDtype = "auto",
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """A few query tokens per request over a long context.

    Example: inkling-backend bench verify --query-tokens 8
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.VERIFY, heads, formats, shape, quick, peers, json, query_dtype)
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
    query_dtype: QueryDtype = "auto",
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """Prefill: many new tokens, after a cached prefix or none.

    Example: inkling-backend bench extend --shape 1x2k+32k --extend flashinfer
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.EXTEND, heads, formats, shape, quick, peers, json, query_dtype)
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
    query_dtype: QueryDtype = "auto",
    quick: Quick = False,
    peers: WithPeers = True,
    sustained: Sustained = 1.0,
    json: JsonFile = None,
) -> None:
    """Quantize K, V and Q, and write K and V into their pages.

    Example: inkling-backend bench store --shape 8k
    """
    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    _kernels(Run(shapes.STORE, heads, formats, shape, quick, peers, json, query_dtype), sustained)


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
    from inkling_backend.engines.sglang.visible import require_visible

    heads = Heads(q_heads, kv_heads, head_dim, page_size)
    run = Run(shapes.ENGINE, heads, formats, shape, quick, peers, json)
    with look.one_line(f"bench {run.command}"):
        names = list(formats or (engines.QUICK_RECIPES if quick else ()))
        recipes, cases = engines.engine_recipes(names), run.cases()
        require_visible()
    beside = (engines.QUICK_PEERS if quick else tuple(engines.PEERS)) if peers else ()

    def work(emit: Emit, say: Say) -> bool:
        server = engines.Server(mem_fraction, tp)
        return engines.run(cases, recipes, server, emit, say, peers=beside)

    count = (len(recipes) + len(beside)) * len(cases)
    _finish(f"bench {run.command}", json, count, table.engine_table, work)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="File of results.")],
    after: Annotated[Path, typer.Argument(help="File of results to compare with it.")],
    tolerance: Annotated[float, typer.Option(min=0, help="Percent that a row may get slower.")] = 5,
) -> None:
    """Compare two files row by row; status 1 if a row got slower.

    Example: inkling-backend bench compare old.json new.json
    """
    with look.one_line("bench compare"):
        result = comparing.compare(read(before), read(after))
    console = Console()
    console.print(table.comparison_table(result, tolerance / 100))
    for path, names in ((before, result.only_before), (after, result.only_after)):
        for name in names:
            console.print(f"only in {path.name}: {name}")
    if not result.pairs:
        typer.echo(f"{look.PROGRAM} bench compare: no row is in both files", err=True)
    raise typer.Exit(0 if result.passed(tolerance / 100) else look.FAILED)


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
    with look.one_line("bench plot"):
        contents = [read(path) for path in files]
    for path in draw(contents, out):
        typer.echo(path)


def _kernels(run: Run, sustained: float, extend: Extend | None = None, **more: int | bool) -> None:
    """Measure an operation of `AttentionRunner`."""
    with look.one_line(f"bench {run.command}"):
        cases = run.cases(**more)
        recipes = run.recipes()
    work = _kernel_work([cases], recipes, run.heads, sustained, peers=run.peers, extend=extend)
    _finish(f"bench {run.command}", run.json, len(cases) * len(recipes), table.results_table, work)


def _kernel_work(
    groups: list[list[Case]],
    recipes: list[Recipe],
    heads: Heads,
    sustained: float,
    *,
    peers: bool,
    extend: Extend | None = None,
) -> Work:
    """Measures groups of cases, each of one operation, in one process."""

    def work(emit: Emit, say: Say) -> bool:
        from inkling_backend.bench.data import Lab
        from inkling_backend.bench.run import Bench
        from inkling_backend.bench.timing import GraphMeter

        torch.manual_seed(0)
        lab = Lab(heads, torch.device("cuda", torch.cuda.current_device()), extend=extend)
        passed = True
        for i, cases in enumerate(groups):
            bench = Bench(lab, GraphMeter(sustained), say, with_peers=peers)
            later = [case for group in groups[i + 1 :] for case in group]
            passed &= bench.run(cases, recipes, emit, later=later)
        return passed

    return work


def _finish(
    command: str, json: Path | None, count: int, draw: Callable[[list[Row]], Table], work: Work
) -> None:
    """Run ``work`` under a progress bar, print the table, end with the right status."""
    if not torch.cuda.is_available():
        typer.echo(
            f"{look.PROGRAM} {command}: no CUDA GPU found, and nothing else is "
            "measured: run it on a machine with one (compare and plot work anywhere)",
            err=True,
        )
        raise typer.Exit(look.NO_GPU)
    results = Results(_host(), json)
    console, errors = Console(), Console(stderr=True)
    passed = interrupted = False
    try:
        with look.progress(console) as progress:
            task = progress.add_task(command, total=count)

            def emit(row: Row) -> None:
                results.add(row)
                progress.advance(task)
                progress.console.print(table.line(row))

            def say(text: str) -> None:
                errors.print(text, markup=False, highlight=False)

            passed = work(emit, say)
    except KeyboardInterrupt:
        interrupted = True
        console.print(f"interrupted: {len(results.rows)} of {count} rows are done")
    console.print(draw(results.rows))
    if json is not None and results.rows:
        console.print(f"results in {json}")
    raise typer.Exit(look.INTERRUPTED if interrupted else 0 if passed else look.FAILED)


def _host() -> dict[str, str]:
    try:
        facts = gpu()
    except (OSError, subprocess.CalledProcessError):
        facts = {"gpu": torch.cuda.get_device_name()}
    return {**facts, **versions(LIBRARIES)}
