"""The built wheel in a fresh environment that holds it and its declared dependencies only.

torch, triton and what they need are linked from this environment instead of downloaded again; pip
sees them as installed and checks the wheel's requirements against them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
DEPENDENCIES = ("torch", "triton")


def closure(names: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """The named distributions and everything that they require here, by normalized name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(name, "") for name in names]
    done = set()
    while waiting:
        name, extra = waiting.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if (key, extra) in done:
            continue
        done.add((key, extra))
        try:
            found.setdefault(key, metadata.distribution(name))
        except metadata.PackageNotFoundError:
            continue  # optional on this platform; pip complains if it is not
        for line in found[key].requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, wanted) for wanted in {"", *requirement.extras}]
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Make a distribution of this environment visible in another site directory."""
    tops = {file.parts[0] for file in distribution.files or []}
    for top in tops - {"..", "__pycache__"}:
        source = Path(str(distribution.locate_file(top)))
        if source.exists() and not (site / top).exists():
            (site / top).symlink_to(source)


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of a fresh environment with the wheel installed."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    for distribution in closure(DEPENDENCIES).values():
        link(distribution, Path(site.strip()))
    # --no-index: nothing may be missing beyond what the wheel declares and the links provide
    run(python, "-m", "pip", "install", "--no-index", wheel, cwd=folder)
    run(python, "-m", "pip", "check", cwd=folder)
    return python


def test_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"inkling_backend"}
    packed = {name for name in names if name.startswith("inkling_backend/")}
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "inkling_backend").rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".md")
    }
    assert packed == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_requires_torch_and_triton_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(name).decode()
    needs = re.findall(r"^Requires-Dist: (?!.*extra ==)([\w.-]+)", text, re.MULTILINE)
    assert sorted(needs) == sorted(DEPENDENCIES)


def test_installed_wheel_quantizes(fresh: Path, tmp_path: Path) -> None:
    program = """
import torch, inkling_backend
from inkling_backend.formats import FORMATS, get_format
x = torch.randn(4, 128, generator=torch.Generator().manual_seed(0))
for name in FORMATS:
    fmt = get_format(name)
    scale = torch.ones(()) if fmt.has_global_scale else None
    y = fmt.dequantize(fmt.quantize(x, scale), scale)
    assert y.shape == x.shape and 0 < (y - x).abs().max() <= x.abs().max() / 4, name
codes = inkling_backend.to_mxfp8(x.to(torch.bfloat16))
print(inkling_backend.__file__)
"""
    where = run(fresh, "-c", program, cwd=tmp_path).strip()
    assert Path(where).is_relative_to(fresh.parent.parent)


def test_entry_point_is_visible_and_the_engine_is_not_needed(fresh: Path, tmp_path: Path) -> None:
    program = """
import importlib.util
from importlib.metadata import entry_points
assert importlib.util.find_spec("sglang") is None
print(*[point.value for point in entry_points(group="sglang.srt.plugins")])
"""
    shown = run(fresh, "-c", program, cwd=tmp_path).split()
    assert shown == ["inkling_backend.engines.sglang.plugin:register"]


def test_command_line_names_the_libraries_it_lacks(fresh: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [fresh.parent / "inkling-backend", "doctor"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "pip install 'inkling-backend[bench]'" in done.stderr
    assert "Traceback" not in done.stderr
