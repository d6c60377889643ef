"""The documents are what `make pages` writes from the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib
import pytest

from integration.pages import diagrams, results, tables
from integration.pages.__main__ import BLOCKS, README, SPEED, draw, fill

PACKAGE = results.ROOT / "inkling_backend"
FOLDERS = ("integration/pages", "integration/benchmarks/pictures", "integration/accuracy")
COMMITTED = sorted(path for name in FOLDERS for path in (results.ROOT / name).glob("*.svg"))


def test_tables_are_written_from_the_newest_results() -> None:
    text = README.read_text()
    assert text == fill(text)
    assert (SPEED / "README.md").read_text() == tables.benchmarks()


def test_a_lost_mark_is_noticed() -> None:
    for name in BLOCKS:
        text = README.read_text().replace(f"<!-- end of {name} -->", "")
        with pytest.raises(ValueError, match=name):
            fill(text)


def test_pictures_are_drawn_from_the_newest_results(tmp_path: Path) -> None:
    by = re.search(r"Matplotlib v([\d.]+)", COMMITTED[0].read_text())
    assert by is not None
    if by[1] != matplotlib.__version__:
        pytest.skip(f"drawn by matplotlib {by[1]}, here is {matplotlib.__version__}")
    drawn = {path.relative_to(tmp_path): path.read_text() for path in draw(tmp_path)}
    committed = {path.relative_to(results.ROOT): path.read_text() for path in COMMITTED}
    assert sorted(drawn) == sorted(committed)
    assert [str(name) for name in drawn if drawn[name] != committed[name]] == []


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_pictures_are_small_and_bring_their_paper(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 64 * 1024
    assert "fill: #ffffff" in text
    assert "<dc:date>" not in text


def test_pictures_are_shown() -> None:
    pages = [README, SPEED / "README.md", results.ROOT / "integration/accuracy/README.md"]
    shown = {
        (page.parent / name).resolve()
        for page in pages
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    assert shown == set(COMMITTED)


def test_the_picture_of_a_step_names_kernels() -> None:
    assert {n for n in diagrams.step_names() if not (PACKAGE / "kernels" / f"{n}.py").exists()} == (
        set()
    )


def test_the_newest_file_of_a_kind_counts(tmp_path: Path) -> None:
    def write(name: str, date: str) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps({"schema": 1, "date": date, "rows": []}))
        return path

    write("2026-11-30-h200-decode.json", "2026-11-30T09:00:00")
    second = write("2026-11-30-h200-decode-2.json", "2026-11-30T12:00:00")
    other = write("2026-12-01-nvidia-h200-decode-store.json", "2026-12-01T09:00:00")
    assert results.newest(tmp_path) == {"decode": second, "decode-store": other}
    write("decode.json", "2026-12-02T09:00:00")
    with pytest.raises(ValueError, match=r"decode\.json: expected a name like"):
        results.newest(tmp_path)


def test_other_kinds_of_results_become_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file without peers, and one of several operations."""
    content = json.loads(results.newest()["decode"].read_text())
    for row in content["rows"]:
        del row["peers"]
    other = [{**content["rows"][0], "op": op, "new_tokens": 4} for op in ("verify", "store")]
    files = {"decode": content, "quick": {**content, "rows": [*content["rows"], *other]}}
    paths = {}
    for kind, each in files.items():
        paths[kind] = tmp_path / f"2026-12-01-h200-{kind}.json"
        paths[kind].write_text(json.dumps(each))
    assert results.newest(tmp_path) == paths
    monkeypatch.setattr(results, "newest", lambda: paths)
    page = tables.benchmarks()
    assert "## quick" in page
    assert "| store mxfp8 64x8k 4 new |" in page
    assert page.count("](pictures/") == len(list((SPEED / "pictures").glob("decode-*.svg")))
    assert "no other BF16 attention" in tables.speeds()
    assert "| `mxfp8` (default) | 8.25 | 2112 | 1.94x | - |" in tables.recipes()
