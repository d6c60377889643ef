"""Prefill over BF16 copies: who takes it and how it is fed; a stand-in takes the place of FA3."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from inkling_backend.attention import AttentionRunner, LayerAttention, fa3, flashinfer_extend
from inkling_backend.attention.fa3 import Kind
from inkling_backend.attention.flashinfer_extend import chosen, plan_bytes, reasons_against, serves
from inkling_backend.attention.spec import AttentionSpec
from inkling_backend.env import Extend, extend
from inkling_backend.errors import EnvironmentVariableError, UnsupportedError
from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout
from tests.attention.fa3_standin import Standin
from tests.attention.world import PLAIN, World, assert_as_accurate, make_world, slots_of

HOPPER = (9, 0)
LENS, Q_LENS = [70, 50, 120, 1, 90], [20, 0, 40, 1, 3]
ROWS = sum(Q_LENS)
# Longest requests, and bytes of the copies: these hold a head of some requests, or everything.
MAX_CONTEXT, TIGHT, WIDE = 128, 1, 1 << 20
LAYERS = (
    PLAIN,
    LayerAttention(0.2, window=40),
    LayerAttention(0.2, softcap=2.0),
    LayerAttention(0.2, window=130, softcap=2.0),
)


def spec(
    dims: tuple[int, int] = (128, 128), dtype: torch.dtype = torch.bfloat16, heads: int = 8
) -> AttentionSpec:
    mxfp8 = get_format("mxfp8")
    return AttentionSpec(
        4 * heads, CacheLayout(mxfp8, mxfp8, heads, *dims), dtype, quantize_query=True
    )


# The choice


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if FlashInfer and a compiler were here."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(flashinfer_extend, "_finds_nvcc", lambda: True)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128)])
def test_what_fa3_takes(dims: tuple[int, int]) -> None:
    assert reasons_against(spec(dims), 131072, HOPPER) == []


@pytest.mark.usefixtures("_installed")
def test_every_reason_is_given() -> None:
    reasons = reasons_against(spec((96, 64), torch.float16), 8 << 20, (10, 0))
    words = ("compute capability 10.0", "float16", "96/64", "2.5 GiB")
    assert len(reasons) == len(words)
    for reason, word in zip(reasons, words, strict=True):
        assert word in reason
    assert "no GPU" in reasons_against(spec(), 4096, None)[0]
    assert "compute capability 8.9" in reasons_against(spec(), 4096, (8, 9))[0]


def test_a_missing_library_or_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install flashinfer-python" in reasons_against(spec(), 4096, HOPPER)[0]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert "nvcc" in reasons_against(spec(), 4096, HOPPER)[0]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert reasons_against(spec(), 4096, HOPPER) == []


def test_layers_that_fa3_does_not_serve() -> None:
    assert all(map(serves, LAYERS))
    assert not serves(LayerAttention(0.1, causal=False))
    assert not serves(LayerAttention(0.1, sinks=torch.zeros(4)))


@pytest.mark.usefixtures("_installed")
def test_auto_takes_what_it_can_and_flashinfer_insists() -> None:
    assert chosen("auto", spec(), 4096, HOPPER)
    assert chosen("flashinfer", spec(), 4096, HOPPER)
    assert not chosen("triton", spec(), 4096, HOPPER)
    assert not chosen("auto", spec(), 4096, (10, 0))
    assert not chosen("triton", spec(), 4096, (10, 0))
    with pytest.raises(UnsupportedError, match=r"(?s)INKLING_EXTEND=flashinfer.*96/96") as error:
        chosen("flashinfer", spec((96, 96)), 4096, (10, 0))
    assert len(error.value.reasons) == 2


def test_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INKLING_EXTEND", raising=False)
    assert extend() == "auto"
    for name in ("auto", "triton", "flashinfer"):
        monkeypatch.setenv("INKLING_EXTEND", name)
        assert extend() == name
    monkeypatch.setenv("INKLING_EXTEND", "fa3")
    with pytest.raises(EnvironmentVariableError, match=r"INKLING_EXTEND='fa3'.*flashinfer"):
        extend()


def test_the_runner_reads_the_environment(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setenv("INKLING_KERNELS", "triton")
    world = make_world([], device, k_dim=96)
    monkeypatch.setenv("INKLING_EXTEND", "auto")
    assert world.runner().kernels.endswith("and extend")
    monkeypatch.setenv("INKLING_EXTEND", "flashinfer")
    with pytest.raises(UnsupportedError, match="96/96"):
        world.runner()
    monkeypatch.setenv("INKLING_KERNELS", "reference")
    with pytest.raises(UnsupportedError, match="plain torch"):
        world.runner()


# How the kernel is fed


@pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_flashinfer_offers_what_is_used() -> None:
    from flashinfer import prefill

    wrapper = prefill.BatchPrefillWithRaggedKVCacheWrapper
    for name in ("plan", "run"):
        ours = inspect.signature(getattr(flashinfer_extend.Wrapper, name)).parameters
        theirs = inspect.signature(getattr(wrapper, name)).parameters
        assert set(ours) <= set(theirs)
        keywords = inspect.Parameter.KEYWORD_ONLY
        places = [name for name, p in ours.items() if p.kind != keywords]
        assert places == list(theirs)[: len(places)]
    arguments = fa3._arguments(128, 128, windowed=True, capped=False)
    module = inspect.signature(prefill.get_customize_batch_prefill_module)
    bound = module.bind("fa3", *arguments["jit_args"], **arguments["jit_kwargs"]).arguments
    assert bound["head_dim_vo"] == 128
    assert bound["additional_tensor_names"] == ["maybe_k_global", "maybe_v_global"]
    assert bound["variant_name"] == "InklingAttention<false>"
    assert {"float_workspace_buffer", "backend", "jit_args", "jit_kwargs"} <= set(
        inspect.signature(wrapper).parameters
    )


def runner_of(
    world: World, choice: Extend = "flashinfer", *, quantize_query: bool = False
) -> AttentionRunner:
    spec = AttentionSpec(world.num_q_heads, world.layout, world.dtype, quantize_query)
    return AttentionRunner(
        spec,
        max_batch=8,
        max_context=world.max_context,
        max_tokens=1 << 20,
        device=world.device,
        extend=choice,
    )


class Feed:
    """A runner whose FA3 is a stand-in."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("INKLING_KERNELS", "triton")
        monkeypatch.setattr(flashinfer_extend, "reasons_against", lambda *_: [])
        monkeypatch.setattr(fa3, "make_wrapper", self._make)
        self.wrappers: list[Standin] = []

    def _make(self, k_dim: int, v_dim: int, kind: Kind, buffer: torch.Tensor) -> Standin:
        self.wrappers.append(Standin(kind, buffer))
        return self.wrappers[-1]

    def runner(self, world: World, choice: Extend = "flashinfer") -> AttentionRunner:
        return runner_of(world, choice)


on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in runs on the CPU")


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Feed:
    return Feed(monkeypatch)


@on_cpu
def test_everything_is_compiled_before_the_first_request(feed: Feed, device: torch.device) -> None:
    runner = feed.runner(make_world(LENS, device, k_dim=128, max_context=MAX_CONTEXT))
    sinks = LayerAttention(0.2, softcap=1.0, sinks=torch.zeros(4))
    runner.prepare([*LAYERS[:2], replace(LAYERS[1], window=7), PLAIN, sinks])
    assert {(w.kind.window is None, w.kind.capped) for w in feed.wrappers} == {
        (True, False),
        (False, False),
    }
    assert len(feed.wrappers) == 2


@on_cpu
def test_a_compiler_that_fails(
    feed: Feed, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("Ninja build failed.\nnvcc fatal: Unsupported gpu architecture")

    runner = feed.runner(make_world(LENS, device, k_dim=128, max_context=MAX_CONTEXT))
    monkeypatch.setattr(fa3, "make_wrapper", fail)
    with pytest.raises(UnsupportedError, match=r"Unsupported gpu architecture.*INKLING_EXTEND=tri"):
        runner.prepare([PLAIN])
    runner.prepare([])


def plan_of(world: World, runner: AttentionRunner, q_lens: list[int] = Q_LENS):  # type: ignore[no-untyped-def]
    indptr = torch.tensor([0, *q_lens]).cumsum(0).to(world.device)
    return runner.plan_extend(
        world.slot_table, world.rows, world.seq_lens, indptr, q_lens, world.lens
    )


def check_all(
    world: World,
    out: torch.Tensor,
    q: torch.Tensor,
    layer: LayerAttention,
    q_lens: list[int] = Q_LENS,
) -> None:
    end = 0
    for request, n in enumerate(q_lens):
        end += n
        if n:
            rows = slice(end - n, end)
            assert_as_accurate(out[rows], world, request, q[rows], layer)


@on_cpu
@pytest.mark.parametrize(
    ("k", "v", "quantized", "size"),
    [("mxfp8", "mxfp8", True, TIGHT), ("nvfp4", "kvfp4", False, WIDE)],
)
def test_rounds_and_features(
    feed: Feed,
    k: str,
    v: str,
    quantized: bool,
    size: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer_extend, "STAGING_BYTES", size)
    world = make_world(LENS, device, k=k, v=v, k_dim=96, v_dim=64, max_context=MAX_CONTEXT)
    runner = feed.runner(world)
    plan = plan_of(world, runner)
    assert len(plan.rounds) == (3 if size == TIGHT else 1)
    query = world.queries(ROWS + 3, quantized=quantized)  # three rows of padding
    for layer in LAYERS:
        out = runner.run(plan, query, world.cache, world.empty_out(ROWS + 3), layer)
        check_all(world, out, query.dequantize(), layer)
        assert out[ROWS:].isnan().all()
    assert {w.kind for w in feed.wrappers} == {
        Kind(layer.window, layer.softcap is not None) for layer in LAYERS
    }


@on_cpu
def test_plans_are_kept_from_layer_to_layer(feed: Feed, device: torch.device) -> None:
    world = make_world(LENS, device)
    runner, query = feed.runner(world), world.queries(ROWS)

    def run(layer: LayerAttention) -> None:
        runner.run(plan, query, world.cache, world.empty_out(ROWS), layer)

    plan = plan_of(world, runner)
    for _ in range(3):
        for layer in LAYERS[:2]:
            run(layer)
    assert [(w.plans, w.runs) for w in feed.wrappers] == [(1, 3), (1, 3)]
    assert feed.wrappers[0].plan_buffer.data_ptr() == feed.wrappers[1].plan_buffer.data_ptr()
    plan = plan_of(world, runner)
    run(PLAIN)
    run(PLAIN)
    run(LAYERS[1])
    assert [(w.plans, w.runs) for w in feed.wrappers] == [(2, 5), (2, 4)]


@on_cpu
def test_more_rounds_than_plans(
    feed: Feed, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_extend, "STAGING_BYTES", TIGHT)
    world = make_world(LENS, device, max_context=MAX_CONTEXT)
    runner, query = feed.runner(world), world.queries(ROWS)
    plan = plan_of(world, runner)
    for layer in (LAYERS[0], LAYERS[1], LAYERS[0]):
        out = runner.run(plan, query, world.cache, world.empty_out(ROWS), layer)
        check_all(world, out, query.dequantize(), layer)
    assert len(feed.wrappers) == 2 * flashinfer_extend.PLANS


def poison(world: World, bad: float) -> None:
    """Puts something that is not finite into V: of request 2, position 95, head 1, column 5."""
    world.cache.v_data[int(slots_of(world, 2)[95]), 1, 5] = bad


def check_poisoned(out: torch.Tensor, clean: torch.Tensor) -> None:
    """Request 2 has positions 80 to 119 in rows 20 to 59; head 1 has query heads 2 and 3."""
    assert out[35:60, 2:, 5].isnan().all()
    assert int(out.isnan().sum()) == 25 * 2
    others = torch.ones(ROWS, 4, dtype=torch.bool)
    others[20:60, 2:] = False
    assert torch.equal(out[others], clean[others])


@on_cpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_where_it_is(feed: Feed, bad: float, device: torch.device) -> None:
    world = make_world(LENS, device)
    query = world.queries(ROWS)
    fed, triton = feed.runner(world), feed.runner(world, "triton")

    def run(runner: AttentionRunner) -> torch.Tensor:
        plan = plan_of(world, runner)
        return runner.run(plan, query, world.cache, world.empty_out(ROWS), PLAIN)

    clean = run(fed)
    poison(world, bad)
    out, expected = run(fed), run(triton)
    check_poisoned(out, clean)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out[20:35, 2:], expected[20:35, 2:]), "computed again by Triton"
    assert torch.equal(run(fed).isnan(), expected.isnan()), "marks of the last layer are gone"


@on_cpu
def test_other_layers_take_triton(feed: Feed, device: torch.device) -> None:
    world = make_world(LENS, device)
    fed, triton, query = feed.runner(world), feed.runner(world, "triton"), world.queries(ROWS)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0])
    for layer in (replace(PLAIN, causal=False), replace(PLAIN, sinks=sinks)):
        outs = [
            runner.run(plan_of(world, runner), query, world.cache, world.empty_out(ROWS), layer)
            for runner in (fed, triton)
        ]
        assert torch.equal(*outs)
    assert not feed.wrappers


def test_its_buffers_are_counted(feed: Feed, device: torch.device) -> None:
    world = make_world(LENS, device, k_dim=128, v_dim=64, max_context=640)
    fed, triton = feed.runner(world), feed.runner(world, "triton")
    copies = 8 * 640 * 2 * (128 + 64) * 2
    plans = flashinfer_extend.PLANS * plan_bytes(4, 8, 8 * 640)
    assert fed.workspace_bytes - triton.workspace_bytes == copies + plans + 8 * (2 + 2) * 4
    assert fed.kernels.endswith("flashinfer fa3")


@pytest.mark.parametrize(
    ("batch", "context", "heads", "shape"),
    [
        (4096, 131072, 8, (4, 131072)),
        (4096, 1 << 20, 8, (1, 1 << 20)),
        (4096, 100_000, 6, (3, 174_762)),
        (4096, 8192, 8, (8, 65536)),
        (2, 8192, 8, (8, 16384)),
    ],
)
def test_the_size_of_the_copies(
    batch: int, context: int, heads: int, shape: tuple[int, int]
) -> None:
    assert flashinfer_extend.staging_shape(spec(heads=heads), batch, context) == shape


def test_plan_bytes() -> None:
    # 7 arrays of int32 with an item for each tile of 128 rows and head.
    assert plan_bytes(32, 0, 8192) >= 7 * 4 * 64 * 32
    assert plan_bytes(32, 0, 8192) < 7 * 4 * 64 * 32 + 8192
    # From 4096 tiles on FlashInfer has one schedule for all heads.
    assert plan_bytes(2, 0, 128 * 20000) >= 7 * 4 * 20000
