"""When centers are fixed, and when never."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from inkling_backend.cache import KVCachePool
from inkling_backend.engines.sglang import versions
from inkling_backend.engines.sglang.centers import MIN_TOKENS, MOST_TOKENS, Centers
from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout

PAGE, PAGES = 32, 100
N = MIN_TOKENS


class Allocator:
    """What the engine's says of its pages."""

    size = PAGE * PAGES + 5  # a last page that is not whole is none

    def __init__(self, used: int) -> None:
        self.used = used

    def available_size(self) -> int:
        return (PAGES - self.used) * PAGE


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "is_first_rank", lambda: True)


def make(used: int) -> tuple[Centers, KVCachePool, SimpleNamespace]:
    """The rule, the buffers it writes, and what it knows of their pool."""
    layout = CacheLayout(get_format("mxfp8"), get_format("mxfp8"), 2, 32, 32, PAGE)
    pages = KVCachePool(layout, 2, 3, "cpu", centers=True)
    pool = SimpleNamespace(page_size=PAGE, centers_are_open=True)
    return Centers(pool, Allocator(used)), pages, pool


def fixed(used: int, new: list[int], total: list[int] | None = None) -> bool:
    centers, _, pool = make(used)
    centers.begin(new, new if total is None else total)
    return not pool.centers_are_open


def test_the_first_prefill_of_an_empty_pool_fixes_them() -> None:
    assert fixed(-(-N // PAGE), [N])
    assert fixed(1 + -(-N // PAGE), [5, N])


@pytest.mark.parametrize(
    ("used", "new", "total"),
    [
        (-(-N // PAGE), [N - 1], None),  # too few
        (1 + -(-N // PAGE), [N], None),  # somebody holds a page: a request, or the prefix cache
        (-(-N // PAGE) + 1, [N], [N + PAGE]),  # a prefix from the cache, or an earlier chunk
        (1 + -(-N // PAGE), [N, 1], [N, 30]),  # a decoding request in a mixed batch
        (0, [N], None),  # a dummy batch holds no page
        (0, [], None),  # decode
    ],
)
def test_nothing_else_fixes_them(used: int, new: list[int], total: list[int] | None) -> None:
    assert not fixed(used, new, total)


def test_they_are_the_mean_of_that_batch_alone() -> None:
    centers, pages, pool = make(-(-N // PAGE))
    keys = torch.randn(N + 3, 2, 32) + 5
    keys[N:] = torch.nan  # padding of the batch
    centers.begin([N], [N])
    for layer in (0, 1):
        centers.see(layer, pages.layer(layer), keys + layer)
    assert pages.k_center is not None
    torch.testing.assert_close(pages.k_center[0], keys[:N].mean(0))
    torch.testing.assert_close(pages.k_center[1], keys[:N].mean(0) + 1)
    before = pages.k_center.clone()
    centers.see(0, pages.layer(0), keys[:N] * 2)  # the same layer again in the same batch
    centers.begin()
    centers.see(0, pages.layer(0), keys[:N] * 2)
    centers.begin([N], [N])  # an empty pool again: its life goes on
    centers.see(0, pages.layer(0), keys[:N] * 2)
    assert torch.equal(pages.k_center, before)
    assert not pool.centers_are_open


def test_a_batch_that_fixes_nothing_leaves_them_zero() -> None:
    centers, pages, _ = make(0)
    centers.begin([N], [N])
    centers.see(0, pages.layer(0), torch.ones(N, 2, 32))
    assert pages.k_center is not None
    assert not pages.k_center.any()


def test_no_more_tokens_than_needed_are_looked_at() -> None:
    tokens = MOST_TOKENS + PAGE
    centers, pages, _ = make(tokens // PAGE)
    keys = torch.zeros(tokens, 2, 32)
    keys[MOST_TOKENS:] = 1
    centers.begin([tokens], [tokens])
    centers.see(0, pages.layer(0), keys)
    assert pages.k_center is not None
    assert not pages.k_center.any()
