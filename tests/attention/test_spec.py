"""Everything that cannot be served is named, all at once."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.attention import AttentionRunner, AttentionSpec, reasons_against, requirements
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import get_format
from inkling_backend.formats.layout import CacheLayout

MXFP8 = get_format("mxfp8")


def make_spec(
    *, heads: tuple[int, int] = (8, 2), dtype: torch.dtype = torch.bfloat16, quantize: bool = False
) -> AttentionSpec:
    layout = CacheLayout(get_format("bf16"), MXFP8, heads[1], 80, 64)
    return AttentionSpec(heads[0], layout, dtype, quantize)


@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_what_is_supported_has_no_reasons(capability: tuple[int, int] | None) -> None:
    assert requirements(make_spec(), capability) == []
    assert requirements(make_spec(heads=(128, 2), dtype=torch.float16), capability) == []


@pytest.mark.parametrize(
    ("spec", "capability", "words"),
    [
        (make_spec(), (7, 5), "compute capability 7.5"),
        (make_spec(heads=(9, 2)), None, "9 query heads are no multiple of 2"),
        (make_spec(heads=(130, 2)), None, "65 query heads share"),
        (make_spec(dtype=torch.float32), None, "float32"),
        (make_spec(quantize=True), None, "quantized query 80"),
    ],
)
def test_each_fault_is_named(
    spec: AttentionSpec, capability: tuple[int, int] | None, words: str
) -> None:
    reasons = requirements(spec, capability)
    assert len(reasons) == 1
    assert words in reasons[0]


def test_all_faults_at_once() -> None:
    reasons = reasons_against(
        num_q_heads=9,
        num_kv_heads=2,
        k_format=MXFP8,
        v_format=MXFP8,
        k_head_dim=72,
        v_head_dim=72,
        page_size=16,
        dtype=torch.float32,
        quantize_query=True,
        capability=(7, 0),
    )
    words = ("head_dim 72", "page size 16", "9 query heads", "float32", "capability 7.0")
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True))


@pytest.mark.parametrize("page_size", [1, 16, 96, 256])
def test_pages_that_attention_does_not_serve(page_size: int) -> None:
    reasons = reasons_against(
        num_q_heads=8,
        num_kv_heads=2,
        k_format=MXFP8,
        v_format=MXFP8,
        k_head_dim=64,
        v_head_dim=64,
        page_size=page_size,
        dtype=torch.bfloat16,
        quantize_query=True,
        capability=(9, 0),
    )
    assert len(reasons) == 1
    assert f"page size {page_size} is not supported" in reasons[0]


def test_a_runner_refuses_with_every_reason() -> None:
    spec = make_spec(heads=(9, 2), dtype=torch.float32)
    with pytest.raises(UnsupportedError) as error:
        AttentionRunner(spec, max_batch=1, max_context=64, max_tokens=64, device="cpu")
    assert len(error.value.reasons) == 2
