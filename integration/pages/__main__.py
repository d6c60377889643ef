"""Write every table and picture of the documents from committed results and the package's facts.

    python -m integration.pages        (or: make pages)

Writes the README's tables (between their marks), the pages beside the results and all pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from inkling_backend.accuracy.plot import plot as plot_accuracy
from inkling_backend.bench.plot import plot as plot_speed
from inkling_backend.bench.results import read
from integration.accuracy.__main__ import HERE as ACCURACY
from integration.accuracy.__main__ import write as write_accuracy
from integration.pages import diagrams, results, tables

README = results.ROOT / "README.md"
SPEED = results.RESULTS.parent
PICTURES = results.ROOT / "integration" / "pages"
# Mark in the README -> what stands between it and its end.
BLOCKS: dict[str, Callable[[], str]] = {
    "recipes": tables.recipes,
    "start": tables.start,
    "speeds": tables.speeds,
}


def fill(text: str) -> str:
    """The README with every block written anew.

    Raises:
        ValueError: a mark is not there exactly once.
    """
    for name, make in BLOCKS.items():
        begin, end = f"<!-- {name}: make pages -->", f"<!-- end of {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"README.md: expected {begin!r} and {end!r} once each")
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{make()}\n{end}{after}"
    return text


def draw(root: Path) -> list[Path]:
    """Draw every picture into folders of ``root`` that are laid out as the checkout's."""

    def inside(folder: Path) -> Path:
        return root / folder.relative_to(results.ROOT)

    newest = [read(path) for kind, path in results.newest().items() if kind in results.DRAWN]
    return [
        *diagrams.draw(inside(PICTURES)),
        *(made for each in newest for made in plot_speed([each], inside(SPEED / "pictures"))),
        *plot_accuracy(read(results.ACCURACY)["rows"], inside(ACCURACY)),
    ]


def main() -> None:
    """Pictures first: a page shows those that are there."""
    for path in draw(results.ROOT):
        print(path.relative_to(results.ROOT))
    write_accuracy()
    (SPEED / "README.md").write_text(tables.benchmarks())
    README.write_text(fill(README.read_text()))


if __name__ == "__main__":
    main()
