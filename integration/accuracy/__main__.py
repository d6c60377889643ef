"""Measure SmolLM2 and the made data, and write the page: results, pictures and README.md.

    python -m integration.accuracy [--page]

Takes about twenty minutes on two free cores (with others at work there, OMP_NUM_THREADS=1 is
faster); ``--page`` only writes the page again, from the results that are there.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from inkling_backend.accuracy import synthetic
from inkling_backend.accuracy.measure import Work, measure
from inkling_backend.accuracy.plot import plot
from inkling_backend.accuracy.settings import DEFAULT_SETTINGS, parse
from inkling_backend.accuracy.subject import load, read_text
from inkling_backend.bench.results import Results, read, versions
from integration.accuracy.page import page
from integration.model import prepare

HERE = Path(__file__).resolve().parent
MODEL, MADE = HERE / "results" / "smollm2.json", HERE / "results" / "synthetic.json"
LAYERS = HERE / "results" / "smollm2_layers.json"
WORK = Work(chunk=1024, chunks=2)
# The two layers of SmolLM2 that cost most alone, by the file above.
_COSTLY = "layers(2:mxfp8,10:mxfp8)"
SETTINGS = (
    *DEFAULT_SETTINGS,
    *("nvfp4+layers(10:mxfp8)", f"nvfp4+{_COSTLY}"),
    f"nvfp4+center+rotate+fouroversix+{_COSTLY}",
)


def run() -> None:
    """Write the files of results, row by row."""
    host = versions(("torch", "transformers"))
    made = Results(host, MADE)
    for row in synthetic.measure([parse(name) for name in DEFAULT_SETTINGS]):
        made.add(row)
    found, subject, text = Results(host, MODEL), load(prepare()), read_text(None)
    settings = [parse(name) for name in SETTINGS]
    for row in measure(subject, text, settings, WORK, lambda: None):
        found.add(row)
        print(row["setting"], row["kl"], flush=True)
    alone = Results(host, LAYERS)
    settings = [parse(f"bf16+layers({layer}:nvfp4)") for layer in range(subject.layers)]
    for row in measure(subject, text, settings, Work(WORK.chunk, 1, ()), lambda: None):
        alone.add({key: row[key] for key in ("model", "setting", "bits", "kl")})


def write() -> None:
    """Write README.md from the results that are there."""
    (HERE / "README.md").write_text(page(read(MODEL), read(MADE), read(LAYERS)))


def main() -> None:
    """Parse the command line, measure if asked, write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--page", action="store_true", help="only write the page again")
    if not parser.parse_args().page:
        run()
    plot(read(MODEL)["rows"], HERE)
    write()


if __name__ == "__main__":
    main()
