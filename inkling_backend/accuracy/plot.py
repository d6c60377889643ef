"""Pictures of rows as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from inkling_backend import figures
from inkling_backend.accuracy.measure import Row
from inkling_backend.accuracy.settings import BASES

# Bases that are no recipe.
_COLORS = {"fp8_per_tensor": figures.COLORS["fp8"], "mxfp8_q_bf16": "#6fa3dc"}


def plot(rows: Sequence[Row], out: Path) -> list[Path]:
    """Draw ``kl.svg`` and ``attention-error.svg`` into a folder; returns their paths."""
    pictures = (("kl", _kl), ("attention-error", _heads))
    shown = [row for row in rows if row["kl"] > 0]
    return [figures.save(draw(shown), out / f"{name}.svg") for name, draw in pictures]


def _color(base: str) -> str:
    return _COLORS.get(base) or figures.color(BASES[base].name)


def _kl(rows: list[Row]) -> Figure:
    """One bar a setting, from the best to the worst."""
    rows = sorted(rows, key=lambda row: -row["kl"])
    figure, axis = plt.subplots(figsize=(9, 1 + 0.27 * len(rows)), layout="constrained")
    for place, row in enumerate(rows):
        axis.barh(place, row["kl"], color=_color(row["setting"].partition("+")[0]))
        axis.annotate(
            f"{row['kl']:.4f}, {row['bits']:g} bits",
            (row["kl"], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    axis.set_yticks(range(len(rows)), [row["setting"] for row in rows], fontsize=8)
    axis.set(xscale="log", xlabel="KL divergence from the BF16 cache, nats a token")
    axis.margins(x=0.25, y=0.01)
    axis.grid(True, axis="x", color=figures.GRID)
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
