"""A model whose layers bring a relative bias, through the runner, with both implementations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from inkling_backend.attention import AttentionSpec, fa4, flashinfer_extend
from inkling_backend.attention.triton_path import TritonPath
from inkling_backend.errors import InvalidTensorError, UnsupportedError
from tests.attention.test_runner import extend_plan
from tests.attention.world import PLAIN, assert_as_accurate, make_world
from tests.kernels.helpers import make_layout

LENS, Q_LENS = [70, 0, 150, 1], [20, 0, 65, 1]


def test_prefill_then_decode(implementation: str, device: torch.device) -> None:
    world = make_world(LENS, device, k="mxfp8")
    runner = world.runner(relative_bias=True)
    assert runner.implementation == implementation
    bias = torch.randn(86, 4, 60).to(world.dtype).to(device)
    layer, query = replace(PLAIN, window=59, bias=bias), world.queries(86)
    plan = extend_plan(world, runner, Q_LENS)
    out = runner.run(plan, query, world.cache, world.empty_out(86), layer)
    end = 0
    for b, n in enumerate(Q_LENS):
        end += n
        if n:
            rows, own = query.dequantize()[end - n : end], replace(layer, bias=bias[end - n : end])
            assert_as_accurate(out[end - n : end], world, b, rows, own)
    decode = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 4)
    query, layer = world.queries(4), replace(layer, bias=bias[:4])
    out = runner.run(decode, query, world.cache, world.empty_out(4), layer)
    for b in range(4):
        own = replace(layer, bias=bias[b : b + 1])
        assert_as_accurate(out[b : b + 1], world, b, query.dequantize()[b : b + 1], own)
    assert not out[1].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda bias: bias[:1], r"bias: expected shape \[2, 4, 1 or more\]"),
        (lambda bias: bias[:, :2], "bias: expected shape"),
        (lambda bias: bias[..., :0], "bias: expected shape"),
        (lambda bias: bias[..., ::2], "a last stride of 1"),
        (lambda bias: bias.int(), "dtype"),
        (lambda bias: bias.double(), "dtype"),
    ],
)
def test_a_bias_that_fits_nothing_is_refused(change: Any, message: str) -> None:
    world = make_world([9, 9], torch.device("cpu"))
    runner = world.runner(relative_bias=True)
    plan = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 2)
    layer = replace(PLAIN, bias=change(torch.zeros(2, 4, 8)))
    with pytest.raises(InvalidTensorError, match=message):
        runner.run(plan, world.queries(2), world.cache, world.empty_out(2), layer)


def test_a_runner_of_another_model_takes_no_bias() -> None:
    world = make_world([9], torch.device("cpu"))
    runner = world.runner()
    plan = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 1)
    layer = replace(PLAIN, bias=torch.zeros(1, 4, 8))
    with pytest.raises(InvalidTensorError, match="for this runner"):
        runner.run(plan, world.queries(1), world.cache, world.empty_out(1), layer)


def test_no_bias_over_a_tree() -> None:
    world = make_world([9], torch.device("cpu"))
    runner = world.runner(relative_bias=True, max_q_len=2)
    tree = torch.tensor([[1, 3]])
    plan = runner.plan_decode(world.slot_table, world.rows, world.seq_lens, 1, 2, tree=tree)
    layer = replace(PLAIN, bias=torch.zeros(2, 4, 8))
    with pytest.raises(InvalidTensorError, match="without a bias over a tree"):
        runner.run(plan, world.queries(2), world.cache, world.empty_out(2), layer)


def test_only_the_portable_kernels_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a Hopper where everything else would be chosen."""
    layout = make_layout("mxfp8", "mxfp8", 2, 128, page=128)
    plain = AttentionSpec(8, layout, torch.bfloat16, quantize_query=True)
    spec = replace(plain, relative_bias=True)

    def kernels(spec: AttentionSpec) -> str:
        sizes = (spec, 4, 1024, 1, torch.device("meta"))
        return TritonPath(*sizes, capability=(9, 0), flashinfer=False).kernels

    assert kernels(plain) == "triton decode_fast and extend"
    assert kernels(spec) == "triton decode and extend"
    monkeypatch.setattr(flashinfer_extend.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_extend, "_finds_nvcc", lambda: True)
    assert flashinfer_extend.chosen("auto", plain, 1024, (9, 0))
    assert not flashinfer_extend.chosen("auto", spec, 1024, (9, 0))
    with pytest.raises(UnsupportedError, match="no relative bias"):
        flashinfer_extend.chosen("flashinfer", spec, 1024, (9, 0))
    assert fa4.reasons_against(plain, (10, 0)) == []
    assert "relative bias" in " ".join(fa4.reasons_against(spec, (10, 0)))
