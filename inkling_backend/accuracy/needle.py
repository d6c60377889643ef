"""Needles in a haystack: numbers hidden at several depths of texts of several lengths.

One text asks for all of its numbers at the end, one after the other. A number counts as found if
each of its tokens is the model's first choice, given the tokens before it (teacher forcing, so one
pass answers every question).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from inkling_backend.accuracy.errors import AccuracyError

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
_NEEDLES = (
    ("Lisbon", 7294),
    ("Oslo", 3518),
    ("Cairo", 9067),
    ("Lima", 4832),
    ("Hanoi", 6175),
)
_HAY = (
    " The river runs past the mill and on to the sea. Boats carry grain in autumn and timber in"
    " spring. On market days the square is full before the bells ring. Bakers sell dark bread,"
    " and farmers bring apples, cheese and honey. When it rains, people wait under the arcades."
    " In winter the ice is thick enough to walk to the island and back. Children skate there until"
    " the lamps are lit. An old road leads over the hills to the next valley."
)

Encode = Callable[[str], list[int]]
Predict = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Haystack:
    """One text of tokens.

    Attributes:
        ids: ``[T]`` int64.
        answers: for each depth the places of its number's tokens in ids.
    """

    ids: torch.Tensor
    answers: tuple[range, ...]

    @property
    def tail(self) -> int:
        """Last positions whose predictions are asked for."""
        return len(self.ids) - self.answers[0].start + 1

    def found(self, choices: torch.Tensor) -> list[bool]:
        """Whether each number is found.

        Args:
            choices: ``[tail]`` the model's first choice for the token after each of the last.
        """
        right = choices[:-1] == self.ids[len(self.ids) - self.tail + 1 :]
        begin = self.answers[0].start
        return [bool(right[a.start - begin : a.stop - begin].all()) for a in self.answers]


def haystack(encode: Encode, prefix: Sequence[int], length: int) -> Haystack:
    """A text of about ``length`` tokens, questions included.

    Args:
        encode: gives the tokens of a text, without special ones.
        prefix: the tokens that every text starts with.

    Raises:
        AccuracyError: the needles and the questions alone are longer.
    """
    needles = [encode(f" The secret number of {city} is {number}.") for city, number in _NEEDLES]
    questions = [encode(f" The secret number of {city} is") for city, _ in _NEEDLES]
    numbers = [encode(f" {number}") for _, number in _NEEDLES]
    stop = encode(".")
    asked = sum(map(len, questions + numbers)) + len(questions) * len(stop)
    room = length - len(prefix) - asked - sum(map(len, needles))
    if room < len(DEPTHS):
        raise AccuracyError(f"a haystack of {length} tokens is too short for its needles")
    hay = encode(_HAY)
    hay = (hay * (room // len(hay) + 1))[:room]
    ids, done = list(prefix), 0
    for depth, needle in zip(DEPTHS, needles, strict=True):
        upto = int(depth * room)
        ids += hay[done:upto] + needle
        done = upto
    ids += hay[done:]
    answers = []
    for question, number in zip(questions, numbers, strict=True):
        ids += question
        answers.append(range(len(ids), len(ids) + len(number)))
        ids += number + stop
    return Haystack(torch.tensor(ids), tuple(answers))


def search(encode: Encode, prefix: Sequence[int], length: int, predict: Predict) -> list[bool]:
    """Whether the number at each of `DEPTHS` is found in a text of this length.

    Args:
        predict: gives the first choices ``[n]`` for the tokens after the last n of ids ``[T]``.
    """
    hay = haystack(encode, prefix, length)
    return hay.found(predict(hay.ids, hay.tail))
