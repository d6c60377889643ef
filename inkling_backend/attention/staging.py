"""How a prefill batch is cut so that each part's K and V fit a buffer: arithmetic on the host."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class Round:
    """Neighbouring requests whose tokens are in the buffer together.

    Attributes:
        first, last: requests, ``last`` exclusive.
        q_first, q_last: their query rows, ``q_last`` exclusive.
        longest: tokens of the longest of them.
        qo_indptr, kv_indptr: ``last - first + 1`` offsets from the round's first row.
    """

    first: int
    last: int
    q_first: int
    q_last: int
    longest: int
    qo_indptr: tuple[int, ...]
    kv_indptr: tuple[int, ...]


def cut_rounds(q_lens: Sequence[int], kv_lens: Sequence[int], capacity: int) -> list[Round]:
    """As few rounds as requests in their order allow; a round without query rows is left out.

    A request is never divided: its result must not depend on who shares the buffer with it.

    Args:
        q_lens: new tokens of each request; one without any takes no room.
        kv_lens: tokens of each request, new ones included, at most ``capacity``.
        capacity: tokens that the buffer holds.
    """
    rounds: list[Round] = []
    first, q_first = 0, 0
    qo, kv = [0], [0]

    def close(last: int) -> None:
        if qo[-1]:
            longest = max(b - a for a, b in itertools.pairwise(kv))
            rounds.append(
                Round(first, last, q_first, q_first + qo[-1], longest, tuple(qo), tuple(kv))
            )

    for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        tokens = kv_len if q_len else 0
        assert tokens <= capacity
        if kv[-1] + tokens > capacity:
            close(request)
            first, q_first = request, q_first + qo[-1]
            qo, kv = [0], [0]
        qo.append(qo[-1] + q_len)
        kv.append(kv[-1] + tokens)
    close(len(q_lens))
    return rounds
