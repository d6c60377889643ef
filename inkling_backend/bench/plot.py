"""Pictures of results as SVG; the only module that needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from inkling_backend.bench.cases import short
from inkling_backend.bench.compare import label
from inkling_backend.bench.results import Row, best_bf16_peer

# One colour for each recipe, the same in every picture; told apart in grey print too.
_COLORS = {
    "mxfp8": "#1f5fa8",
    "nvfp4": "#d1651a",
    "kvfp4": "#7a9e2f",
    "mxfp8-nvfp4": "#8a5aa8",
    "bf16": "#555555",
}
_PEER = "#b0b0b0"
_PEER_NAME = "best bf16 peer"


def plot(contents: list[dict[str, Any]], out: Path) -> list[Path]:
    """Draws every operation in the files; returns the paths written.

    For each operation: ``OP-time.svg`` (time against context and against batch),
    ``OP-roofline.svg`` (bytes per second against bytes) and ``OP-speedup.svg`` (against the best
    BF16 peer), each where there is something to show. Of a row in several files the last counts.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = {label(row): row for content in contents for row in content["rows"] if "us" in row}
    written = []
    for op in dict.fromkeys(row["op"] for row in rows.values()):
        mine = [row for row in rows.values() if row["op"] == op]
        pictures = (("time", _time(mine)), ("roofline", _roofline(mine)), ("speedup", _bars(mine)))
        for name, figure in pictures:
            if figure is None:
                continue
            figure.suptitle(f"{op}: {_host(contents[-1])}", fontsize=10)
            path = out / f"{op}-{name}.svg"
            figure.savefig(path)
            plt.close(figure)
            written.append(path)
    return written


def _host(content: dict[str, Any]) -> str:
    host = content.get("host", {})
    versions = [f"{key} {host[key]}" for key in ("torch", "triton", "flashinfer") if key in host]
    return ", ".join([host.get("gpu", "unknown GPU"), *versions, content.get("date", "")[:10]])


def _color(row: Row) -> str:
    return _COLORS.get(row["format"], "#000000")


def _time(rows: list[Row]) -> Figure:
    """Two axes: against context for each batch, and against batch for each context."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained", sharey=True)
    for axis, x, fixed in ((axes[0], "context", "batch"), (axes[1], "batch", "context")):
        _lines(axis, rows, x, fixed)
        axis.set_xlabel(f"{x}, one line for each {fixed}")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.grid(True, which="major", color="#e0e0e0")
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
    for (_, value), points in series.items():
        points.sort(key=lambda row: row[x])
        xs, ys = [row[x] for row in points], [row["us"] for row in points]
        axis.plot(xs, ys, "o-", color=_color(points[0]), markersize=4, linewidth=1.2)
        axis.annotate(
            short(value),
            (xs[-1], ys[-1]),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=7,
            color=_color(points[0]),
        )
    peers = {(row[fixed], row[x]): best_bf16_peer(row) for row in rows}
    for value in sorted({key[0] for key in peers}):
        line = sorted((at, us) for (group, at), us in peers.items() if group == value and us)
        if line:
            axis.plot(*zip(*line, strict=True), "s--", color=_PEER, markersize=3, linewidth=1)


def _legend(rows: list[Row]) -> list[Any]:
    formats = dict.fromkeys(row["format"] for row in rows)
    return [Line2D([], [], color=_COLORS.get(f, "#000000"), label=f) for f in formats]


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
            [row["bytes"] for row in mine], speeds, s=22, color=_color(mine[0]), label=name
        )
    axis.set(
        xscale="log",
        xlabel="bytes that the operation must move",
        ylabel="terabytes a second",
        ylim=(0, None),
    )
    axis.grid(True, color="#e0e0e0")
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
    formats = list(dict.fromkeys(row["format"] for group in groups.values() for row, _ in group))
    figure, axis = plt.subplots(figsize=(max(6.0, 1.3 * len(groups)), 4.5), layout="constrained")
    width = 0.8 / len(formats)
    for i, group in enumerate(groups.values()):
        for row, ratio in group:
            at = i + (formats.index(row["format"]) - (len(formats) - 1) / 2) * width
            axis.bar(at, ratio, width, color=_color(row))
            axis.annotate(f"{ratio:.2f}", (at, ratio), ha="center", va="bottom", fontsize=6)
    axis.axhline(1, color="#000000", linewidth=1)
    axis.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axis.set_ylabel(f"times faster than the {_PEER_NAME}")
    axis.legend(handles=_legend([row for group in groups.values() for row, _ in group]), fontsize=8)
    return figure
