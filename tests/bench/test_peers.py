"""Peers get the same requests, are checked, and are absent with a reason when they fail."""

from __future__ import annotations

import sys

import pytest
import torch

from inkling_backend.bench import peer_calls
from inkling_backend.bench.cases import DECODE, EXTEND, STORE, VERIFY, Case
from inkling_backend.bench.peers import Peers
from tests.bench import libraries
from tests.bench.world import HEADS, FakeMeter, make_lab

CPU = torch.device("cpu")
EVERY = {peer.name for peer in peer_calls.PEERS}
CASES = {
    "decode": (Case(DECODE, 3, 70, 1, HEADS, ragged=True), EVERY),
    "store": (Case(DECODE, 2, 70, 1, HEADS, store=True), {"flashinfer_bf16", "fa3_bf16"}),
    "verify": (Case(VERIFY, 2, 70, 4, HEADS, ragged=True), EVERY - {"flashinfer_nvfp4"}),
    "extend": (Case(EXTEND, 2, 70, 66, HEADS), EVERY - {"flashinfer_nvfp4"}),
    "scatter": (Case(STORE, 1, 20, 20, HEADS), {"torch_bf16"}),
}


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def peers(said: list[str]) -> Peers:
    return Peers(make_lab(CPU), FakeMeter(), said.append)


@pytest.mark.parametrize("name", CASES)
def test_every_peer_that_serves_the_operation_is_measured(
    name: str, peers: Peers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch)
    case, expected = CASES[name]
    peers.warm_up([case])
    peers.wait()
    assert peers.measure(case) == dict.fromkeys(expected, 10.0)
    assert said == []


def test_a_wrong_peer_is_left_out(
    peers: Peers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch)
    right = libraries.flash_attn_with_kvcache

    def wrong(*arguments: torch.Tensor, **more: object) -> torch.Tensor:
        return right(*arguments, **more) * 1.5  # type: ignore[arg-type]

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_with_kvcache", wrong)
    case, _ = CASES["decode"]
    assert set(peers.measure(case)) == EVERY - {"fa3_bf16", "fa3_fp8"}
    assert [text.split()[0] for text in said] == ["fa3_bf16", "fa3_fp8"]
    assert "relative error 0.5" in said[0]


def test_what_is_not_installed_is_said_once(
    peers: Peers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    case, _ = CASES["decode"]
    peers.warm_up([case])
    peers.wait()
    for _ in range(2):
        assert set(peers.measure(case)) == EVERY - {"fa3_bf16", "fa3_fp8"}
    assert sorted(text.split()[0] for text in said) == ["fa3_bf16", "fa3_fp8"]
    assert all("flash_attn_interface" in text for text in said)


def test_a_case_that_fits_nowhere_has_no_peers(
    peers: Peers, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    libraries.install(monkeypatch)

    def fail(*arguments: object, **more: object) -> None:
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr("inkling_backend.bench.data.Lab.filled_pool", fail)
    assert peers.measure(CASES["decode"][0]) == {}
    assert "no memory" in said[0]
