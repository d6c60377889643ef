"""Settings side by side on one model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from inkling_backend.accuracy import needle
from inkling_backend.accuracy.metrics import Distance
from inkling_backend.accuracy.settings import Setting, parse
from inkling_backend.accuracy.simulate import CacheSimulation
from inkling_backend.accuracy.subject import Subject, cut

Row = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What every setting reads.

    Attributes:
        chunk: tokens of one sequence.
        chunks: sequences that count. One more goes before them: the first that a pool stores.
        needle_lengths: tokens of the haystacks.
    """

    chunk: int = 1024
    chunks: int = 4
    needle_lengths: tuple[int, ...] = (512, 1024)

    def passes(self, settings: Sequence[Setting]) -> int:
        """Passes through the model, for a progress bar."""
        others = sum(setting.name != "bf16" for setting in settings)
        texts = self.chunks + others * (self.chunks + 1)
        return texts + len(settings) * len(self.needle_lengths)


def measure(
    subject: Subject,
    text: str,
    settings: Sequence[Setting],
    work: Work,
    advance: Callable[[], None],
) -> Iterator[Row]:
    """One row for each setting, as soon as it is done.

    Args:
        advance: called after every pass through the model.

    Raises:
        AccuracyError: the text is too short, or the model's attention is not simulated.
    """
    for setting in settings:
        setting.bits(subject.layers)  # refuses layers that are none, before anything is computed
    first, *chunks = cut(subject, text, work.chunk, work.chunks + 1)

    def logits(ids: torch.Tensor, simulation: CacheSimulation, last: int = 0) -> torch.Tensor:
        result = subject.logits(ids, simulation, last)
        advance()
        return result

    plain = CacheSimulation(parse("bf16"))
    references = [logits(ids, plain) for ids in chunks]
    for setting in settings:
        simulation, distance = CacheSimulation(setting), Distance()
        if setting.name == "bf16":
            simulation = plain
        else:
            logits(first, simulation, 1)
            simulation.forget_errors()
        for ids, reference in zip(chunks, references, strict=True):
            seen = reference if simulation is plain else logits(ids, simulation)
            distance.add(reference, seen, ids)
        errors = simulation.relative_errors()
        found = _search(subject, work, partial(logits, simulation=simulation))
        yield _row(subject, setting, work, distance, errors, found)


def _search(subject: Subject, work: Work, logits: Callable[..., torch.Tensor]) -> list[list[bool]]:
    """Needles found, ``[length][depth]``."""

    def predict(ids: torch.Tensor, last: int) -> torch.Tensor:
        return logits(ids, last=last).argmax(-1)

    return [
        needle.search(subject.encode, subject.prefix, length, predict)
        for length in work.needle_lengths
    ]


def _row(
    subject: Subject,
    setting: Setting,
    work: Work,
    distance: Distance,
    errors: list[list[float]],
    found: list[list[bool]],
) -> Row:
    numbers = {"kl": distance.kl, "perplexity": distance.perplexity, "top1": distance.top1}
    heads = [error for layer in errors for error in layer]
    bits = short(setting.bits(subject.layers))
    row: Row = {"model": subject.name, "setting": setting.name, "bits": bits}
    row |= {name: short(value) for name, value in numbers.items()}
    row["tokens"] = work.chunk * work.chunks
    if work.needle_lengths:
        row["needle"] = {
            "lengths": list(work.needle_lengths),
            "depths": list(needle.DEPTHS),
            "found": found,
            "score": short(sum(map(sum, found)) / sum(map(len, found))),
        }
    row["attention_error"] = {
        "mean": short(sum(heads) / len(heads)) if heads else 0.0,
        "heads": [[short(error, 3) for error in layer] for layer in errors],
    }
    return row


def short(value: float, digits: int = 6) -> float:
    """The number as a file needs it."""
    return float(f"{value:.{digits}g}")
