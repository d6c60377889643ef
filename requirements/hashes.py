"""Write every pinned version with the hashes of its wheels, for ``pip install --require-hashes``.

    python requirements/hashes.py requirements/lock.txt > requirements/hashes.txt

The wheels are those that pip would choose on Linux, x86-64, for each Python that the tests run on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

PYTHONS = ("3.11", "3.12")
# glibc of 2014 to 2024, as pip names them.
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in range(39, 4, -1)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]


def wheels(lock: Path, python: str) -> dict[str, tuple[str, str]]:
    """Name -> (version, sha256) of the wheels that a Python would install."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
        command += ["--ignore-installed", "--only-binary=:all:", "--target", folder]
        command += ["--implementation", "cp", "--python-version", python]
        command += [word for name in PLATFORMS for word in ("--platform", name)]
        subprocess.run([*command, "--report", str(report), "-r", str(lock)], check=True)
        found = json.loads(report.read_text())["install"]
    return {
        each["metadata"]["name"]: (
            each["metadata"]["version"],
            each["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for each in found
    }


def main() -> None:
    """Print the requirements."""
    hashes: dict[tuple[str, str], set[str]] = {}
    for python in PYTHONS:
        for name, (version, sha256) in wheels(Path(sys.argv[1]), python).items():
            hashes.setdefault((name, version), set()).add(sha256)
    print(f"# lock.txt with the hashes of its wheels: Linux, x86-64, Python {', '.join(PYTHONS)}.")
    print("# Written by `make lock`.")
    for (name, version), found in sorted(hashes.items(), key=lambda item: item[0][0].lower()):
        lines = [f"{name}=={version}", *(f"    --hash=sha256:{each}" for each in sorted(found))]
        print(" \\\n".join(lines))


if __name__ == "__main__":
    main()
