"""What Inkling's layers are shown, and what is taken of what they hand over."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from inkling_backend.engines.sglang import inkling_model, versions
from inkling_backend.engines.sglang.flags import Flags
from inkling_backend.engines.sglang.requirements import _inkling_reasons
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import Query

ARGUMENTS = {"attention_backend": "inkling", "kv_cache_dtype": "mxfp8", "page_size": 128}


def score_mod() -> None:
    """Stands for the engine's ``relative_bias_score_mod``."""


@pytest.fixture(autouse=True)
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "relative_bias_score_mod", lambda: score_mod)
    monkeypatch.setattr(versions, "stores_inkling_kv", lambda: True)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: SimpleNamespace(**ARGUMENTS)  # type: ignore[attr-defined]
    context.get_model = lambda: SimpleNamespace(**ARGUMENTS)  # type: ignore[attr-defined]
    srt = ModuleType("sglang.srt")
    srt.runtime_context = context  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    monkeypatch.setitem(sys.modules, "sglang.srt", srt)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)


def asked(layers: Any) -> tuple[str, str]:
    """The backend and the cache that the engine's layers find, as both versions ask."""
    if hasattr(layers, "serving_attention_backend"):
        return layers.serving_attention_backend(None), layers.get_model().kv_cache_dtype
    found = layers.get_server_args()
    assert found.page_size == 128, "the rest is as it was"
    return found.attention_backend, found.kv_cache_dtype


def layers(new: bool) -> Any:
    if new:
        return SimpleNamespace(serving_attention_backend=lambda batch: "inkling", get_model=None)
    return SimpleNamespace(get_server_args=None)


@pytest.mark.parametrize("new", [False, True])
@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        ({}, "auto"),
        ({"inkling_query_dtype": "bf16"}, "auto"),
        ({"inkling_query_dtype": "mxfp8"}, "mxfp8"),
        ({"inkling_query_dtype": "mxfp8", "inkling_key_transform": "rotate"}, "auto"),
    ],
)
def test_the_layers_find_triton_and_quantize_where_it_is_wanted(
    new: bool, flags: dict[str, str], dtype: str
) -> None:
    module = layers(new)
    for _ in range(2):  # once for each runner
        inkling_model.present(module, Flags(**flags))
        assert asked(module) == ("triton", dtype)


def test_the_layers_that_would_quantize_k_quantize_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "stores_inkling_kv", lambda: False)
    module = layers(True)
    inkling_model.present(module, Flags(inkling_query_dtype="mxfp8"))
    assert asked(module) == ("triton", "auto")


def test_a_bias_comes_in_two_ways() -> None:
    bias, waited = torch.zeros(2, 4, 8), []
    event = SimpleNamespace(wait=lambda: waited.append(True))
    for kwargs in (
        {"rel_bias": bias, "rel_bias_event": event, "sinks": None},
        {"score_mod": score_mod, "aux_tensors": [bias], "sinks": None},
    ):
        assert inkling_model.take_bias(kwargs) is bias
        assert kwargs == {"sinks": None}
    assert waited == [True]
    assert inkling_model.take_bias({}) is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"score_mod": print, "aux_tensors": [torch.zeros(2, 4, 8)]},
        {"score_mod": score_mod, "aux_tensors": [torch.zeros(2, 4, 8)] * 2},
        {"aux_tensors": [torch.zeros(2, 4, 8)]},
        {"score_mod": score_mod},
        {"score_mod": score_mod, "aux_tensors": [None], "rel_bias": torch.zeros(2, 4, 8)},
    ],
)
def test_another_score_mod_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="pass a score_mod"):
        inkling_model.take_bias(kwargs)


def test_a_quantized_query_is_taken_as_it_is() -> None:
    want = Query.quantize(torch.randn(5, 4, 64))
    assert want.scale is not None
    kwargs = {"q_descale": want.scale.view(torch.float8_e8m0fnu)}
    q = want.data.view(torch.float8_e4m3fn).flatten(1)
    got = inkling_model.take_query(q, 4, 64, kwargs)
    assert got is not None
    assert torch.equal(got.data, want.data)
    assert got.scale is not None
    assert torch.equal(got.scale, want.scale)
    assert not kwargs
    assert inkling_model.take_query(torch.zeros(5, 256), 4, 64, {}) is None


def test_one_backend_serves_both_phases() -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(model_type="inkling_mm_model"))
    assert versions.is_inkling(model)
    assert _inkling_reasons(("inkling", "inkling"), model) == []
    (reason,) = _inkling_reasons(("inkling", "triton"), model)
    assert "both phases" in reason
    other = SimpleNamespace(hf_config=SimpleNamespace(model_type="llama"))
    assert not versions.is_inkling(other)
    assert _inkling_reasons(("inkling", "triton"), other) == []
    assert not versions.is_inkling(SimpleNamespace())
