"""Rounds of a batch whose K and V do not fit the buffer together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_backend.attention.staging import cut_rounds


def test_requests_share_a_round_as_long_as_they_fit() -> None:
    rounds = cut_rounds([2, 3, 4, 1], [60, 40, 30, 71], 100)
    assert [(r.first, r.last, r.q_first, r.q_last, r.longest) for r in rounds] == [
        (0, 2, 0, 5, 60),
        (2, 3, 5, 9, 30),
        (3, 4, 9, 10, 71),
    ]
    assert rounds[0].qo_indptr == (0, 2, 5)
    assert rounds[0].kv_indptr == (0, 60, 100)


def test_requests_without_new_tokens_take_no_room() -> None:
    (only,) = cut_rounds([0, 5, 0], [100, 90, 100], 100)
    assert (only.qo_indptr, only.kv_indptr) == ((0, 0, 5, 5), (0, 0, 90, 90))
    assert cut_rounds([0, 0], [7, 100], 100) == []
    assert cut_rounds([], [], 100) == []


def test_a_round_is_itself_alone() -> None:
    one, other = (cut_rounds([1], [1], 1)[0] for _ in range(2))
    assert one != other


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 91)), max_size=30))
def test_every_row_is_in_one_round_that_fits(lens: list[tuple[int, int]]) -> None:
    q_lens = [q for q, _ in lens]
    kv_lens = [q + prefix for q, prefix in lens]
    rounds = cut_rounds(q_lens, kv_lens, 100)
    assert [x for r in rounds for x in range(r.q_first, r.q_last)] == list(range(sum(q_lens)))
    for r in rounds:
        assert 0 < r.kv_indptr[-1] <= 100
        got = [b - a for a, b in pairwise(r.qo_indptr)]
        assert got == q_lens[r.first : r.last]
    for a, b in pairwise(rounds):
        head = next(i for i in range(b.first, b.last) if q_lens[i])
        assert a.kv_indptr[-1] + kv_lens[head] > 100 or b.first > a.last


def test_a_request_beyond_the_buffer_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        cut_rounds([1], [101], 100)
