"""Pictures of results as SVG."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from inkling_backend import figures
from inkling_backend.bench.cases import short
from inkling_backend.bench.compare import label
from inkling_backend.bench.results import Row, best_bf16_peer

_PEER = "#9a9a9a"
_PEER_NAME = "best bf16 peer"
# Behind numbers that may cross a line.
_PAPER = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}


def plot(contents: list[dict[str, Any]], out: Path) -> list[Path]:
    """Draws every operation in the files; returns the paths written.

    For each operation: ``OP-time.svg`` (time against context and against batch),
    ``OP-roofline.svg`` (bytes per second against bytes) and ``OP-speedup.svg`` (against the best
    BF16 peer), each where there is something to show. Of a row in several files the last counts.
    """
    rows = {label(row): row for content in contents for row in content["rows"] if "us" in row}
    written = []
    for op in dict.fromkeys(row["op"] for row in rows.values()):
        mine = [row for row in rows.values() if row["op"] == op]
        pictures = (("time", _time(mine)), ("roofline", _roofline(mine)), ("speedup", _bars(mine)))
        for name, figure in pictures:
            if figure is None:
                continue
            figure.suptitle(f"{op}: {_host(contents[-1])}", fontsize=10)
            written.append(figures.save(figure, out / f"{op}-{name}.svg"))
    return written


def _host(content: dict[str, Any]) -> str:
    host = content.get("host", {})
    versions = [f"{key} {host[key]}" for key in ("torch", "triton", "flashinfer") if key in host]
    return ", ".join([host.get("gpu", "unknown GPU"), *versions, content.get("date", "")[:10]])


def _time(rows: list[Row]) -> Figure:
    """Two axes: against context for each batch, and against batch for each context."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for axis, x, fixed in ((axes[0], "context", "batch"), (axes[1], "batch", "context")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        _lines(axis, rows, x, fixed)
        axis.set_xlabel(f"{x}, one line for each {fixed}")
        axis.grid(True, which="major", color=figures.GRID)
    axes[0].set_ylabel("microseconds a layer")
    handles = _legend(rows)
    if any(best_bf16_peer(row) is not None for row in rows):
        handles.append(Line2D([], [], color=_PEER, linestyle="--", label=_PEER_NAME))
    axes[0].legend(handles=handles, fontsize=8)
    return figure


def _lines(axis: Axes, rows: list[Row], x: str, fixed: str) -> None:
    series: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        series.setdefault((row["format"], row[fixed]), []).append(row)
    for points in series.values():
        points.sort(key=lambda row: row[x])
        xs, ys = [row[x] for row in points], [row["us"] for row in points]
        color = figures.color(points[0]["format"])
        axis.plot(xs, ys, "o-", color=color, markersize=4, linewidth=1.2)
    peers = {(row[fixed], row[x]): best_bf16_peer(row) for row in rows}
    for value in sorted({key[0] for key in peers}):
        line = sorted((at, us) for (group, at), us in peers.items() if group == value and us)
        if line:
            axis.plot(*zip(*line, strict=True), "s--", color=_PEER, markersize=3, linewidth=1)
    for value in sorted({row[fixed] for row in rows}):
        # One label for all recipes: above the slowest at the line's end.
        last = max((row for row in rows if row[fixed] == value), key=lambda r: (r[x], r["us"]))
        axis.annotate(
            f"{fixed} {short(value)}",
            (last[x], last["us"]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
            fontsize=7,
            bbox=_PAPER,
        )
    ticks = sorted({row[x] for row in rows})
    axis.set_xticks(ticks, [short(tick) for tick in ticks])
    axis.minorticks_off()
    axis.margins(x=0.12, y=0.12)


def _in_order(names: Iterable[str]) -> list[str]:
    """Each name once, those that have a colour first."""
    return sorted(set(names), key=lambda name: (*figures.COLORS, name).index(name))


def _legend(rows: list[Row]) -> list[Any]:
    formats = _in_order(row["format"] for row in rows)
    return [Line2D([], [], color=figures.color(f), label=f) for f in formats]


def _roofline(rows: list[Row]) -> Figure | None:
    """Bytes per second that each row achieves, beside what a copy of as many bytes does."""
    rows = [row for row in rows if "bytes" in row]
    if not rows:
        return None
    figure, axis = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    copies = sorted(
        (row["bytes"], row["bytes"] / row["copy_us"]) for row in rows if row.get("copy_us")
    )
    if copies:
        xs, ys = zip(*copies, strict=True)
        axis.plot(xs, [y / 1e6 for y in ys], color="#000000", linewidth=1, label="device copy")
    for name in dict.fromkeys(row["format"] for row in rows):
        mine = [row for row in rows if row["format"] == name]
        speeds = [row["bytes"] / row["us"] / 1e6 for row in mine]
        axis.scatter(
            [row["bytes"] for row in mine], speeds, s=22, color=figures.color(name), label=name
        )
    axis.set(
        xscale="log",
        xlabel="bytes that the operation must move",
        ylabel="terabytes a second",
        ylim=(0, None),
    )
    axis.grid(True, color=figures.GRID)
    axis.legend(fontsize=8)
    return figure


def _bars(rows: list[Row]) -> Figure | None:
    """How many times faster than the best BF16 peer."""
    groups: dict[str, list[tuple[Row, float]]] = {}
    for row in rows:
        peer = best_bf16_peer(row)
        if peer is not None:
            shape = label({**row, "format": "", "op": "", "backend": ""}).strip()
            groups.setdefault(shape, []).append((row, peer / row["us"]))
    if not groups:
        return None
    formats = _in_order(row["format"] for group in groups.values() for row, _ in group)
    figure, axis = plt.subplots(figsize=(max(6.0, 1.3 * len(groups)), 4.5), layout="constrained")
    width = 0.8 / len(formats)
    axis.axhline(1, color="#000000", linewidth=1, zorder=0.5)
    for i, group in enumerate(groups.values()):
        for row, ratio in group:
            at = i + (formats.index(row["format"]) - (len(formats) - 1) / 2) * width
            axis.bar(at, ratio, width, color=figures.color(row["format"]))
            axis.annotate(
                f"{ratio:.2f}",
                (at, ratio),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90,
                fontsize=7,
                bbox=_PAPER,
            )
    axis.margins(x=0.01, y=0.12)
    axis.set_xticks(range(len(groups)), list(groups), fontsize=9)
    axis.set_ylabel(f"times faster than the {_PEER_NAME}")
    legend = _legend([row for group in groups.values() for row, _ in group])
    axis.legend(handles=legend, fontsize=8, ncols=len(legend), loc="upper right")
    return figure
