"""How every picture is drawn: colours, fonts, and the same SVG bytes for the same content.

The only module that needs matplotlib before a picture is asked for; those who draw import it late.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

matplotlib.rcParams.update(
    {
        # Identifiers in the file follow from this instead of from chance.
        "svg.hashsalt": "inkling",
        # Letters stay letters: small files, and text that can be searched.
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
        # Pages may be dark: a picture brings its own paper.
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
        "axes.axisbelow": True,
    }
)

# One colour for each recipe, the same in every picture; told apart in grey print too.
COLORS = {
    "mxfp8": "#1f5fa8",
    "nvfp4": "#d1651a",
    "kvfp4": "#7a9e2f",
    "mxfp4": "#b5446e",
    "mxfp8-nvfp4": "#8a5aa8",
    "bf16": "#555555",
    "fp8": "#b0b0b0",
}
GRID = "#e0e0e0"


def color(name: str) -> str:
    """Colour of a recipe; black for a name that is none."""
    return COLORS.get(name, "#000000")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure as SVG, close it, return its path; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
    # Spaces before the ends of lines are matplotlib's own.
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rstrip() for line in lines) + "\n")
    return path
