"""The model under test and the text that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inkling_backend.accuracy.errors import AccuracyError
from inkling_backend.accuracy.settings import parse
from inkling_backend.accuracy.simulate import ATTENTION, CacheSimulation


@dataclass(frozen=True)
class Subject:
    """A causal language model whose attention is a `CacheSimulation`.

    Attributes:
        network: the transformers model, in float32 so that the cache alone differs.
        tokenizer: its tokenizer.
    """

    name: str
    network: Any
    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    @property
    def prefix(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text."""
        return self.tokenizer("")["input_ids"]

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return int(self.network.config.get_text_config(decoder=True).num_hidden_layers)

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor, simulation: CacheSimulation, last: int = 0) -> torch.Tensor:
        """Logits of one sequence ``[T]`` over a simulated cache.

        Args:
            last: for how many of the last positions; 0 means all.

        Returns:
            ``[last or T, vocabulary]`` float32 on the CPU.
        """
        simulation.install()
        batch = ids[None].to(self.network.device)
        output = self.network(input_ids=batch, use_cache=False, logits_to_keep=last)
        return output.logits[0].float().cpu()


def load(path: Path, device: str | None = None) -> Subject:
    """The model in a folder as transformers saves it.

    Args:
        device: as torch names it; the GPU if there is one, by default.

    Raises:
        AccuracyError: there is no model, or its attention cannot be exchanged.
    """
    if not (path / "config.json").is_file():
        raise AccuracyError(f"{path}: expected a folder with a model's config.json and weights")
    CacheSimulation(parse("bf16")).install()
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        network = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation=ATTENTION
        )
    except (OSError, ValueError) as error:
        raise AccuracyError(f"{path}: {error}") from None
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Subject(path.resolve().name, network.to(where).eval(), tokenizer)


def read_text(file: Path | None) -> str:
    """A file's text, or the language reference that comes with Python.

    Raises:
        AccuracyError: the file cannot be read as UTF-8.
    """
    if file is None:
        return "\n".join(topics.topics[name] for name in sorted(topics.topics))
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise AccuracyError(f"{file}: expected a text in UTF-8, got {error}") from None


def cut(subject: Subject, text: str, tokens: int, count: int) -> list[torch.Tensor]:
    """``count`` successive chunks ``[tokens]`` of the text, each with the tokenizer's prefix.

    Raises:
        AccuracyError: the text is too short.
    """
    ids, prefix = subject.encode(text), subject.prefix
    step = tokens - len(prefix)
    if step < 2 or len(ids) < step * count:
        raise AccuracyError(
            f"{count} chunks of {tokens} tokens are needed, but the text has {len(ids)} tokens: "
            "give a longer --text or smaller --chunks"
        )
    return [torch.tensor(prefix + ids[i * step : (i + 1) * step]) for i in range(count)]
