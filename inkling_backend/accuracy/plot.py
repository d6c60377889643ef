"""Pictures of rows as SVG; the only module of the measurement that needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from inkling_backend.accuracy.measure import Row

# Identifiers in the file follow from this instead of from chance: the same rows, the same bytes.
matplotlib.rcParams["svg.hashsalt"] = "inkling"


def plot(rows: Sequence[Row], out: Path) -> list[Path]:
    """Draw ``kl.svg`` and ``attention-error.svg`` into a folder; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (("kl", _kl), ("attention-error", _heads)):
        figure = draw([row for row in rows if row["kl"] > 0])
        path = out / f"{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
        written.append(path)
    return written


def _kl(rows: list[Row]) -> Figure:
    """One bar a setting, from the best to the worst."""
    rows = sorted(rows, key=lambda row: -row["kl"])
    figure, axis = plt.subplots(figsize=(9, 1 + 0.27 * len(rows)), layout="constrained")
    bases = list(dict.fromkeys(row["setting"].partition("+")[0] for row in rows))
    for place, row in enumerate(rows):
        color = f"C{bases.index(row['setting'].partition('+')[0])}"
        axis.barh(place, row["kl"], color=color)
        text = f" {row['kl']:.4f}, {row['bits']:g} bits"
        axis.annotate(text, (row["kl"], place), va="center", fontsize=7)
    axis.set_yticks(range(len(rows)), [row["setting"] for row in rows], fontsize=8)
    axis.set(xscale="log", xlabel="KL divergence from the BF16 cache, nats a token")
    axis.margins(x=0.25, y=0.01)
    axis.grid(True, axis="x", color="#e0e0e0")
    axis.set_axisbelow(True)
    return figure


def _heads(rows: list[Row]) -> Figure:
    """Relative error of the attention output, a panel a base setting: layers down, heads across."""
    rows = [row for row in rows if "+" not in row["setting"]] or rows[:1]
    count = max(len(rows), 1)
    figure, axes = plt.subplots(
        1, count, figsize=(1.6 * count + 1, 5), layout="constrained", sharey=True, squeeze=False
    )
    peak = max(e for row in rows for layer in row["attention_error"]["heads"] for e in layer)
    for axis, row in zip(axes[0], rows, strict=True):
        image = axis.imshow(
            row["attention_error"]["heads"], vmin=0, vmax=peak, aspect="auto", cmap="viridis"
        )
        axis.set_title(row["setting"].replace("_v_", "\nv_"), fontsize=7)
        axis.set_xlabel("head", fontsize=8)
    axes[0][0].set_ylabel("layer")
    figure.colorbar(image, ax=axes[0], label="relative error of the attention output")
    return figure
