"""Needles: where they lie, and when they count as found."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.accuracy import needle
from inkling_backend.accuracy.errors import AccuracyError


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def decode(ids: torch.Tensor) -> str:
    return "".join(map(chr, ids.tolist()))


def test_a_haystack_has_its_length_and_its_needles_at_their_depths() -> None:
    hay = needle.haystack(encode, [1], 2000)
    text = decode(hay.ids)
    assert len(text) == 2000
    assert text[0] == "\x01"
    questions = hay.answers[0].start
    for depth, city in zip(
        needle.DEPTHS, ("Lisbon", "Oslo", "Cairo", "Lima", "Hanoi"), strict=True
    ):
        place = text.index(f"The secret number of {city} is")
        assert abs(place / questions - depth) < 0.08
        assert text.count(city) == 2


def test_answers_are_the_numbers() -> None:
    hay = needle.haystack(encode, [], 1500)
    text = decode(hay.ids)
    numbers = [text[a.start : a.stop] for a in hay.answers]
    assert numbers == [" 7294", " 3518", " 9067", " 4832", " 6175"]
    for answer in hay.answers:
        assert text[: answer.start].endswith(" is")
        assert text.count(text[answer.start : answer.stop]) == 2


def test_who_says_the_numbers_finds_all() -> None:
    def oracle(ids: torch.Tensor, last: int) -> torch.Tensor:
        return torch.cat((ids[1:], ids[:1]))[-last:]

    assert needle.search(encode, [], 1500, oracle) == [True] * 5


def test_one_wrong_digit_is_a_needle_lost() -> None:
    hay = needle.haystack(encode, [], 1500)

    def almost(ids: torch.Tensor, last: int) -> torch.Tensor:
        said = torch.cat((ids[1:], ids[:1]))
        said[hay.answers[1].stop - 2] += 1
        return said[-last:]

    assert needle.search(encode, [], 1500, almost) == [True, False, True, True, True]


def test_a_short_haystack_is_refused() -> None:
    with pytest.raises(AccuracyError, match="300 tokens"):
        needle.haystack(encode, [], 300)
