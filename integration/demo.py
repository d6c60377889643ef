"""A real language model answers from a block-scaled KV cache, in every recipe.

Starts ``sglang serve --attention-backend inkling`` with SmolLM2-135M-Instruct, on the GPU if there
is one, and asks it one question over the OpenAI API.

    python -m integration.demo [--recipe mxfp8] [--question "..."]
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import sys
import time
from pathlib import Path

from integration.launch import RECIPES, has_gpu, options
from integration.model import QUESTION, prepare
from integration.server import Server


def answer(model: Path, recipe: str, question: str) -> None:
    """Start a server with a recipe, print what it says about its cache and its answer."""
    start = time.monotonic()
    keywords = options(model, recipe)
    print(f"\n== {recipe}: starting the server", flush=True)
    with Server(keywords) as server:
        ready = time.monotonic()
        print("$ sglang serve", shlex.join(server.flags))
        for line in re.findall(r"^.*inkling.*bytes per token.*$", server.log, re.MULTILINE):
            print(line)
        print(f"question: {question}")
        print(f"answer:   {server.chat(question)}")
        answered = time.monotonic()
    print(f"started in {ready - start:.0f} s, answered in {answered - ready:.1f} s", flush=True)


def main() -> None:
    """Ask the question with the chosen recipe first, then with the others."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", choices=RECIPES, default="mxfp8")
    parser.add_argument("--question", default=QUESTION)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    model = prepare()
    print(f"SmolLM2-135M-Instruct on the {'GPU' if has_gpu() else 'CPU'}")
    for recipe in sorted(RECIPES, key=lambda name: name != args.recipe):
        answer(model, recipe, args.question)


if __name__ == "__main__":
    main()
