"""Every kernel, at its launch settings, compiles for every architecture and fits it."""

from __future__ import annotations

from typing import Any

import pytest

from inkling_backend.kernels.arch import CHECKED_CAPABILITIES, shared_memory_limit
from tests.kernels.compile_check import all_cases, check

ARCHES = {major * 10 + minor: (major, minor) for major, minor in CHECKED_CAPABILITIES}


@pytest.fixture(scope="session")
def compiled(request: pytest.FixtureRequest) -> dict[tuple[str, int], dict[str, Any]]:
    """What became of the selected cases: one process compiles them all."""
    selection = [
        (item.callspec.params["name"], item.callspec.params["arch"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and "compiled" in item.fixturenames
    ]
    return check(selection)


PAIRS = [
    (name, arch)
    for name, case in all_cases().items()
    for arch, capability in ARCHES.items()
    if capability >= case.capability
]


@pytest.mark.parametrize(("name", "arch"), PAIRS)
def test_compiles_and_fits(
    name: str, arch: int, compiled: dict[tuple[str, int], dict[str, Any]]
) -> None:
    row = compiled[name, arch]
    assert "error" not in row, row["error"]
    assert row["shared"] <= shared_memory_limit(ARCHES[arch])
    spilled = f"{row['stack']} bytes a thread spilled, {row['registers']} registers"
    assert row["stack"] <= all_cases()[name].spill_bytes, spilled
    assert row["ftz"] == 0, "float32 subnormals would be flushed"


def test_every_kernel_module_has_cases() -> None:
    kernels = {case.kernel.__name__ for case in all_cases().values()}
    assert {"store_kernel", "gather_kernel"} <= kernels
