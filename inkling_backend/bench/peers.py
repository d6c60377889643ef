"""Times of the peers of one case, in the same process and the same way as ours.

Their outputs are compared with the reference too: a peer that is wrong is no peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch

from inkling_backend.bench import gate
from inkling_backend.bench.cases import EXTEND, STORE, Case
from inkling_backend.bench.data import Batch, Lab, free_memory, make_batch, randn, store_inputs
from inkling_backend.bench.peer_calls import LIBRARIES, PEERS, Inputs, Pages, Peer, make_pages
from inkling_backend.bench.timing import Launch, Meter
from inkling_backend.formats import Query, get_recipe
from inkling_backend.formats.layout import LayerCache

Say = Callable[[str], None]


class Peers:
    """Peers of one run; each is measured once for a case.

    Args:
        say: called with a line for each reason why a peer is absent, once.
    """

    def __init__(self, lab: Lab, meter: Meter, say: Say) -> None:
        self._lab, self._meter, self._say = lab, meter, say
        self._absent: set[str] = set()
        self._said: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None

    def warm_up(self, cases: list[Case]) -> None:
        """Begin to build what peers compile at their first call, all at once, in the background.

        `wait` must come before anything is captured.
        """
        # Here, because threads that import the same modules side by side can meet half of one.
        for library in LIBRARIES:
            with suppress(Exception):
                importlib.import_module(library)
        kinds = {case.op: case for case in cases if case.op != STORE}
        self._pool = ThreadPoolExecutor(max(1, len(PEERS)))
        for case in kinds.values():
            small = Case(case.op, 1, case.heads.page_size, case.new_tokens, case.heads)
            if case.op == EXTEND:
                small = Case(EXTEND, 1, case.heads.page_size, case.heads.page_size, case.heads)
            for peer in PEERS:
                if peer.build(case.op) is not None:
                    self._pool.submit(self._try, peer, small)

    def wait(self) -> None:
        """Until everything is built."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _try(self, peer: Peer, case: Case) -> None:
        try:
            launch = self._build(peer, case)
            launch(0)
            if self._lab.device.type == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            self._absent.add(peer.name)
            self._report(peer.name, error)

    def _build(self, peer: Peer, case: Case) -> Launch:
        """One layer of a small case."""
        lab, heads = self._lab, case.heads
        build = peer.build(case.op)
        assert build is not None
        batch = make_batch(case, 0, lab.device)
        pool = lab.pool(get_recipe("bf16"), 1, batch.num_pages)
        q = randn(case.batch * case.new_tokens, heads.q_heads, heads.head_dim, device=lab.device)
        pages = make_pages(lab, peer, [pool.layer(0)], case)
        return build(Inputs(lab, case, batch, q, pages))

    def _report(self, name: str, error: Exception) -> None:
        text = f"{name} is left out: {gate.reason(error)}"
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def measure(self, case: Case) -> dict[str, float]:
        """Microseconds of a layer, of each peer that works."""
        found: dict[str, float] = {}
        try:
            if case.op == STORE:
                found["torch_bf16"] = self._scatter(case)
            else:
                self._attend(case, found)
        except Exception as error:
            self._report(f"every peer of {case.name}", error)
        return {name: round(us, 3) for name, us in found.items()}

    def _attend(self, case: Case, found: dict[str, float]) -> None:
        lab, heads = self._lab, case.heads
        present = [p for p in PEERS if p.build(case.op) and p.name not in self._absent]
        if case.store:
            present = [peer for peer in present if peer.element == torch.bfloat16]
        if not present:
            return
        free_memory(lab)
        batch = make_batch(case, 0, lab.device)
        pool = lab.filled_pool(get_recipe("bf16"), batch.num_pages, rotate=case.rotates)
        layers = [pool.layer(i) for i in range(pool.num_layers)]
        q = randn(case.batch * case.new_tokens, heads.q_heads, heads.head_dim, device=lab.device)
        for peer in present:
            try:
                found[peer.name] = self._measure(peer, case, batch, q, layers)
            except Exception as error:
                self._report(peer.name, error)
            free_memory(lab)

    def _measure(
        self, peer: Peer, case: Case, batch: Batch, q: torch.Tensor, layers: list[LayerCache]
    ) -> float:
        pages = make_pages(self._lab, peer, layers, case)
        build = peer.build(case.op)
        assert build is not None
        attend = build(Inputs(self._lab, case, batch, q, pages))
        launch = _with_scatter(attend, pages, batch, case) if case.store else attend
        last: list[Any] = []

        def keep(i: int) -> None:
            last[:] = [launch(i)]

        calls = len(pages.k)
        replay = self._meter.capture(keep, calls)
        replay()
        if peer.bound is not None:
            cache = layers[(calls - 1) % len(layers)]
            layer = self._lab.layer
            error = gate.attention_error(cache, batch, Query(q), last[0], layer)
            gate.check_attention(error, peer.bound)
        return self._meter.time(replay, calls).us

    def _scatter(self, case: Case) -> float:
        """K and V written to their slots in BF16 by torch: what a plain pool does."""
        inputs = store_inputs(self._lab, get_recipe("bf16"), case, rotate=True)
        pool = inputs.pool

        def launch(i: int) -> None:
            cache, (k, v, _) = pool.layer(i), inputs.rows[i]
            cache.k_data[inputs.slots[i]] = k
            cache.v_data[inputs.slots[i]] = v

        replay = self._meter.capture(launch, pool.num_layers)
        return self._meter.time(replay, pool.num_layers).us


def _with_scatter(attend: Launch, pages: Pages, batch: Batch, case: Case) -> Launch:
    """Writes new K and V into their slots before it attends, as a plain pool does."""
    heads = case.heads
    rows = randn(len(batch.new_slots), heads.kv_heads, heads.head_dim, device=pages.k[0].device)
    shape = (-1, heads.kv_heads, heads.head_dim)

    def launch(i: int) -> object:
        pages.k[i].view(shape)[batch.new_slots] = rows
        pages.v[i].view(shape)[batch.new_slots] = rows
        return attend(i)

    return launch
