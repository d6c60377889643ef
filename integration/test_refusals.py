"""Everything that cannot be served is refused at start-up, before weights load, with the reason.

The models have no weights at all: a start that got as far as loading them would say so. A GPU too
old is the one refusal that needs such a GPU; the unit tests of the requirements cover it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from integration.launch import options
from integration.refusals import Outcome, Refusals
from integration.tiny_models import ENCODER_DECODER, GPT_OSS, LATENT, LLAMA, write_config

MODELS: dict[str, dict[str, object]] = {
    "llama": LLAMA,
    "latent": LATENT,
    "encoder_decoder": ENCODER_DECODER,
    "odd_head": LLAMA | {"head_dim": 72},
}
NVFP4 = {"fp4_kv_cache_recipe": "nvfp4"}

# name of the case: model, recipe of `options`, further keywords, what the message must name
CASES: dict[str, tuple[str, str | None, Mapping[str, object], tuple[str, ...]]] = {
    "latent attention": ("latent", "mxfp8", {}, ("MLA",)),
    "encoder-decoder model": ("encoder_decoder", "mxfp8", {}, ("encoder-decoder",)),
    "head_dim off the block": ("odd_head", "mxfp8", {}, ("head_dim 72", "mxfp8", "32")),
    "head_dim off the small block": ("odd_head", "nvfp4", {}, ("head_dim 72", "nvfp4", "16")),
    "page size": ("llama", "mxfp8", {"page_size": 16}, ("16", "32, 64, 128")),
    "all reasons at once": (
        "odd_head",
        "mxfp8",
        {"page_size": 16},
        ("head_dim 72", "page size 16"),
    ),
    "recipe with another backend": (
        "llama",
        None,
        {"attention_backend": "torch_native", **NVFP4},
        ("--fp4-kv-cache-recipe", "nvfp4", "--attention-backend inkling"),
    ),
    "recipe without a backend": (
        "llama",
        None,
        NVFP4,
        ("--fp4-kv-cache-recipe", "nvfp4", "--attention-backend inkling"),
    ),
    "recipe against a dtype": (
        "llama",
        "nvfp4",
        {"kv_cache_dtype": "mxfp8"},
        ("--fp4-kv-cache-recipe", "nvfp4", "--kv-cache-dtype", "mxfp8"),
    ),
    "unknown recipe": (
        "llama",
        "mxfp8",
        {"fp4_kv_cache_recipe": "fp3"},
        ("fp3", "nvfp4", "kvfp4"),
    ),
    "unserved dtype": (
        "llama",
        "mxfp8",
        {"kv_cache_dtype": "fp8_e4m3"},
        ("fp8_e4m3", "mxfp8", "nvfp4", "fp4_mx_block16", "bf16"),
    ),
    "only for prefill": (
        "llama",
        None,
        {"prefill_attention_backend": "inkling", "decode_attention_backend": "torch_native"},
        ("inkling", "torch_native"),
    ),
    "only for decode": (
        "llama",
        None,
        {"prefill_attention_backend": "torch_native", "decode_attention_backend": "inkling"},
        ("inkling", "torch_native"),
    ),
}


def keywords(folder: Path, case: str) -> dict[str, object]:
    name, recipe, extra, _ = CASES[case]
    model = write_config(folder / name, MODELS[name])
    return options(model, recipe, skip_tokenizer_init=True, **extra)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("models")
    starts = [keywords(folder, case) for case in CASES]
    return dict(zip(CASES, Refusals().run(starts), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_server_exits_with_the_reason(outcomes: dict[str, Outcome], case: str) -> None:
    outcome = outcomes[case]
    assert outcome.status > 0, outcome.output[-3000:]
    assert "Load weight begin" not in outcome.output
    *_, expected = CASES[case]
    message = outcome.output[outcome.output.rfind("Traceback") + 1 :]
    assert not [part for part in expected if part not in message], message[-3000:]


@pytest.mark.parametrize("case", ["recipe against a dtype", "unknown recipe", "page size"])
def test_engine_keywords_are_refused_alike(tmp_path: Path, case: str) -> None:
    (outcome,) = Refusals().run([keywords(tmp_path, case)], program="engine")
    assert outcome.status > 0
    *_, expected = CASES[case]
    assert not [part for part in expected if part not in outcome.output], outcome.output[-3000:]


@pytest.mark.parametrize("base", [LLAMA, GPT_OSS], ids=["llama", "gpt_oss"])
def test_the_same_start_without_a_fault_is_not_refused(
    tmp_path: Path, base: dict[str, object]
) -> None:
    """The cases above fail for their reason and not for how they are started."""
    model = write_config(tmp_path, base)
    start = options(model, "mxfp8", skip_tokenizer_init=True)
    (outcome,) = Refusals().run([start])
    assert "Load weight begin" in outcome.output, outcome.output[-3000:]
