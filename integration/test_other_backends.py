"""With the plugin installed every other backend works, and refuses, as it did without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from integration.engine import RealEngine
from integration.launch import options
from integration.model import QUESTION
from integration.refusals import Refusals
from integration.tiny_models import LLAMA, write_config

OTHER = {"attention_backend": "torch_native"}


def test_torch_native_still_serves(model: Path) -> None:
    with RealEngine(options(model, None, **OTHER)) as engine:
        assert "Paris" in engine.ask(QUESTION)
        assert "bytes per token" not in engine.log


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_bf16_cache_can_be_shared_with_another_backend(model: Path, phase: str) -> None:
    other = "decode" if phase == "prefill" else "prefill"
    backends = {
        f"{phase}_attention_backend": "inkling",
        f"{other}_attention_backend": "torch_native",
        "kv_cache_dtype": "bf16",
    }
    with RealEngine(options(model, None, **backends)) as engine:
        assert "Paris" in engine.ask(QUESTION)
        assert "recipe bf16" in engine.log


def test_torch_native_keeps_its_refusals(tmp_path: Path) -> None:
    llama = write_config(tmp_path, LLAMA)
    dtypes = ("mxfp8", "nvfp4", "fp4_mx_block16")
    starts = [options(llama, None, **OTHER, kv_cache_dtype=dtype) for dtype in dtypes]
    with_plugin, without = (Refusals(env).run(starts) for env in ({}, {"SGLANG_PLUGINS": "none"}))
    for ours, theirs in zip(with_plugin, without, strict=True):
        assert ours.status != 0
        assert ours.error == theirs.error
