"""The committed page is what its command writes from the committed results."""

from __future__ import annotations

import re

from inkling_backend.accuracy.settings import DEFAULT_SETTINGS
from inkling_backend.bench.results import read
from integration.accuracy.__main__ import HERE, LAYERS, MADE, MODEL, SETTINGS
from integration.accuracy.page import page


def test_the_page_is_written_from_its_results() -> None:
    assert (HERE / "README.md").read_text() == page(read(MODEL), read(MADE), read(LAYERS))


def test_every_setting_was_measured() -> None:
    settings = [row["setting"] for row in read(MODEL)["rows"]]
    assert settings == list(SETTINGS)
    assert set(DEFAULT_SETTINGS) == {row["setting"] for row in read(MADE)["rows"]}


def test_pictures_of_the_page_exist() -> None:
    named = re.findall(r"\]\((\w[\w.-]*)\)", (HERE / "README.md").read_text())
    assert len(named) == 3
    assert all((HERE / name).exists() for name in named)
