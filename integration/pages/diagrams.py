"""Drawings of the package: a page, a step, and what fits."""

from __future__ import annotations

import tempfile
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

from inkling_backend import figures
from inkling_backend.bench.cases import Heads, short
from inkling_backend.bench.engine import write_model
from inkling_backend.cli.model import read_model
from inkling_backend.cli.plan import Plan, gpu_bytes, plan
from inkling_backend.formats.layout import DEFAULT_PAGE_SIZE, SideLayout
from integration.pages.tables import CHOICE, layout_of

_INK, _PALE, _SCALE = "#303030", "#f2f2f2", "#f3c98b"
_GPU, _CONTEXT = "H200", 32768


def draw(out: Path) -> list[Path]:
    """Write ``layout.svg``, ``step.svg`` and ``capacity.svg`` into a folder; return their paths."""
    pictures = (("layout", page_layout), ("step", step), ("capacity", capacity))
    return [figures.save(make(), out / f"{name}.svg") for name, make in pictures]


def _canvas(width: float, height: float, units: float) -> tuple[Figure, Axes]:
    """Axes without axes, with so many units an inch."""
    figure = plt.figure(figsize=(width / units, height / units))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def _text(axis: Axes, x: float, y: float, text: str, size: float = 8, **more: object) -> None:
    axis.text(x, y, text, fontsize=size, color=_INK, **{"va": "center", **more})  # type: ignore[arg-type]


def _cell(
    axis: Axes, x: float, y: float, width: float, height: float, fill: str, text: str = ""
) -> None:
    axis.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=_INK, linewidth=0.6))
    if text:
        _text(axis, x + width / 2, y + height / 2, text, 7, ha="center")


def page_layout() -> Figure:
    """Where the bytes of a token lie: data and scales of a page, and a token's bytes per recipe."""
    figure, axis = _canvas(112, 62, 12)
    page = DEFAULT_PAGE_SIZE
    heads = layout_of("mxfp8").num_kv_heads
    _text(axis, 2, 59.5, "Data buffer  [slots, KV heads, row]", 10, weight="bold")
    _text(axis, 2, 56.8, f"slot = page x {page} + t; one row for each token and head", 8)
    slots = (
        ("slot 0", "the engine's padding: never written"),
        ("slot 1", "page 0, t = 1"),
        ("...", ""),
        (f"slot {page}", "page 1, t = 0"),
        ("...", ""),
    )
    for i, (name, note) in enumerate(slots):
        y = 52 - 3.2 * i
        _text(axis, 8, y + 1.4, name, 7, ha="right")
        for head in range(4):
            label = f"head {head}" if head < 3 else f"... {heads - 1}"
            fill = "#d0d0d0" if i == 0 else _PALE
            _cell(axis, 9 + 7 * head, y, 7, 2.8, fill, "" if name == "..." else label)
        _text(axis, 38, y + 1.4, note, 7)
    for i, (name, what) in enumerate((("mxfp8", "MXFP8"), ("nvfp4", "FP4"))):
        side = layout_of(name).k
        y, size = 33.4 - 3.8 * i, side.format.data_bytes(side.head_dim)
        _cell(axis, 9, y, size * 28 / 128, 2.8, _tint(figures.color(name)), f"{size} bytes")
        said = f"{what}: {side.head_dim} codes of {size * 8 // side.head_dim} bits"
        if size < side.head_dim:
            said += ", even element in the low nibble"
        _text(axis, 9 + size * 28 / 128 + 1, y + 1.4, said, 7)
    _text(axis, 8, 34.8, "a row", 7, ha="right")

    _text(axis, 62, 59.5, "Scale buffer  [pages, KV heads, bytes]", 10, weight="bold")
    _text(axis, 62, 56.8, "one contiguous piece for each page and head", 8)
    fp4 = layout_of("nvfp4")
    _scales(
        axis, 62, 48.2, layout_of("mxfp8").k, "MXFP8", "by t % 32, t // 32, block, as FA4 reads"
    )
    _scales(axis, 62, 39.2, fp4.k, "FP4, K", "by t, block")
    _scales(axis, 62, 30.2, fp4.v, "FP4, V", "by block, t")
    _token_bytes(axis)
    return figure


def _scales(axis: Axes, x: float, y: float, side: SideLayout, what: str, order: str) -> None:
    """The first scale bytes of a (page, head), in the order in which they lie."""
    _text(axis, x, y + 5.2, f"{what}: {DEFAULT_PAGE_SIZE} x {side.blocks} bytes, {order}", 8)
    lo, hi, step = side.scale_strides
    tokens, blocks = range(DEFAULT_PAGE_SIZE), range(side.blocks)
    at = {(t % 32) * lo + (t // 32) * hi + b * step: (t, b) for t in tokens for b in blocks}
    shown = 8
    for place in range(shown):
        token, block = at[place]
        _cell(axis, x + 5.2 * place, y + 0.8, 5.2, 2.8, _SCALE, f"t{token} b{block}")
    _text(axis, x + 5.2 * shown + 1, y + 2.2, "...", 8)


def _token_bytes(axis: Axes) -> None:
    """A bar for each recipe: data and scales of K and of V of a token in a layer."""
    heads = layout_of("bf16").num_kv_heads
    title = (
        f"Bytes of a token in a layer ({heads} KV heads, head_dim {layout_of('bf16').k_head_dim})"
    )
    _text(axis, 2, 23.5, title, 10, weight="bold")
    unit = 78 / layout_of("bf16").bytes_per_token
    for i, name in enumerate(CHOICE):
        layout, y, x = layout_of(name), 18.5 - 4.2 * i, 16.0
        _text(axis, 15, y + 1.4, name, 8, ha="right")
        for letter, side in (("K", layout.k), ("V", layout.v)):
            data = heads * side.format.data_bytes(side.head_dim)
            scale = heads * side.format.scale_bytes(side.head_dim)
            _cell(axis, x, y, data * unit, 2.8, _tint(figures.color(name)), f"{letter} {data}")
            x += data * unit
            if scale:
                _cell(axis, x, y, scale * unit, 2.8, _SCALE)
                x += scale * unit
        _text(axis, x + 1, y + 1.4, f"{layout.bytes_per_token}", 8, weight="bold")
    _cell(axis, 84, 22.3, 2.4, 2.4, _SCALE)
    _text(axis, 87.5, 23.5, "scales", 8)


def _tint(color: str) -> str:
    """A paler one, on which black letters can be read."""
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{(part + 2 * 255) // 3:02x}" for part in parts)


# Boxes of the step: name -> left, bottom, width, lines; the first is the kernel module or object.
_STEP: dict[str, tuple[float, float, float, tuple[str, ...]]] = {
    "model": (2, 22, 15, ("model", "q, k, v of the", "new tokens")),
    "store": (
        24,
        22,
        20,
        ("store", "one launch: Q, K, V", "quantized; K and V", "into their slots"),
    ),
    "pages": (52, 22, 16, ("pages", "codes and scales", "of this layer")),
    "plan": (78, 49, 26, ("plan", "once a step: page tables", "and work items")),
    "decode": (
        *(78, 31, 26),
        ("decode_fast", "+ decode_redo (or decode)", "few query tokens a request"),
    ),
    "extend": (78, 13, 26, ("extend", "many query tokens", "(Hopper: stage, then FA3)")),
    "merge": (112, 31, 18, ("merge", "adds the splits in", "order of position")),
    "out": (135, 22, 13, ("out", "of the layer")),
}
_KERNELS = ("store", "decode", "extend", "merge", "plan")
_HEIGHT = 11


def step_names() -> set[str]:
    """Kernel modules that the picture of a step names."""
    return {_STEP[name][3][0] for name in _KERNELS} | {"decode_redo", "stage"}


def step() -> Figure:
    """One attention layer, from the model's q, k, v to its output."""
    figure, axis = _canvas(150, 64, 13)
    for name, (x, y, width, lines) in _STEP.items():
        fill = "#dce8f5" if name in _KERNELS else "#fbeedd" if name == "pages" else _PALE
        axis.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                _HEIGHT,
                boxstyle="round,pad=0,rounding_size=1",
                facecolor=fill,
                edgecolor=_INK,
                linewidth=0.8,
            )
        )
        top = y + _HEIGHT - 2
        _text(axis, x + width / 2, top, lines[0], 10, ha="center", weight="bold")
        for i, line in enumerate(lines[1:]):
            _text(axis, x + width / 2, top - 2.6 * (i + 1), line, 8, ha="center")
    for start, end in (
        (_right("model"), _left("store")),
        (_right("store"), _left("pages")),
        (_right("pages", 1), _left("decode", -2)),
        (_right("pages", -1), _left("extend", 2)),
        ((91, 49), (91, 31 + _HEIGHT)),
        (_right("decode"), _left("merge")),
        (_right("merge"), (139, 22 + _HEIGHT)),
        (_right("extend"), (139, 22)),
    ):
        _arrow(axis, start, end)
    # The queries pass by the pages.
    _arrow(axis, (34, 22 + _HEIGHT), _left("decode", 2), "angle,angleA=90,angleB=180,rad=3")
    _arrow(axis, (34, 22), _left("extend", -2), "angle,angleA=-90,angleB=180,rad=3")
    _text(axis, 36, 40, "queries, in MXFP8 with mxfp8", 8)
    _text(axis, 36, 15, "queries", 8)
    _text(axis, 2, 60.5, "One layer of one step", 11, weight="bold")
    _text(
        axis,
        2,
        57,
        "blue: a kernel; orange: memory. Decode dequantizes in registers.",
        8,
    )
    sizes = ", ".join(f"{layout_of(name).bytes_per_token} in {name}" for name in CHOICE)
    _text(axis, 2, 8, f"Bytes of a token's K and V in the pages of a layer: {sizes}.", 8)
    said = (
        "New tokens are stored first and then read back: a token has one value, whether it was "
        "just computed, prefilled in another chunk or found in the prefix cache."
    )
    _text(axis, 2, 4.5, said, 8)
    return figure


def _left(name: str, up: float = 0) -> tuple[float, float]:
    x, y, _, _ = _STEP[name]
    return x, y + _HEIGHT / 2 + up


def _right(name: str, up: float = 0) -> tuple[float, float]:
    x, y, width, _ = _STEP[name]
    return x + width, y + _HEIGHT / 2 + up


def _arrow(
    axis: Axes, start: tuple[float, float], end: tuple[float, float], path: str = "arc3"
) -> None:
    style = {"arrowstyle": "-|>", "color": _INK, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 0}
    axis.annotate("", end, start, arrowprops=style | {"connectionstyle": path})


def what_fits() -> Plan:
    """The plan of the capacity picture: Llama 3.1 8B's shape."""
    with tempfile.TemporaryDirectory() as folder:
        shape = read_model(write_model(Path(folder), Heads()))
    return plan(shape, memory_bytes=gpu_bytes(_GPU, None), context=_CONTEXT)


def capacity() -> Figure:
    """Tokens that fit beside the weights, per recipe."""
    made = what_fits()
    figure, axis = plt.subplots(figsize=(9, 2.9), layout="constrained")
    rows = made.rows[::-1]
    axis.barh(
        [row.recipe for row in rows],
        [row.tokens / 1e6 for row in rows],
        color=[figures.color(row.recipe) for row in rows],
    )
    for i, row in enumerate(rows):
        axis.annotate(
            f"{row.requests} requests of {short(made.context)}",
            (row.tokens / 1e6, i),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_xlabel("million tokens of KV cache")
    axis.margins(x=0.2)
    axis.grid(True, axis="x", color=figures.GRID)
    gib = made.cache_bytes / 2**30
    axis.set_title(
        f"Llama 3.1 8B on one {_GPU}: {gib:.0f} GiB beside the weights (inkling-backend plan)",
        fontsize=10,
    )
    return figure
