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
    "scales of NVFP4 without NVFP4": (
        "llama",
        "mxfp8",
        {"inkling_nvfp4_scale": "fouroversix"},
        ("is a rule of NVFP4 blocks",),
    ),
    "sink tokens of a BF16 cache": (
        "llama",
        "bf16",
        {"inkling_sink_tokens": 1},
        ("which keeps every token in BF16",),
    ),
    "recipe of a layer that is none": (
        "llama",
        "nvfp4",
        {"inkling_layer_recipes": "1:mxfp8,2:mxfp8"},
        ("names layer 2, but the model has layers 0 to 1",),
    ),
    "drafting trees": (
        "llama",
        "mxfp8",
        {
            "speculative_algorithm": "EAGLE",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 4,
            "speculative_num_draft_tokens": 8,
        },
        ("--speculative-eagle-topk",),
    ),
    "broad trees of n-grams": (
        "llama",
        "mxfp8",
        {"speculative_algorithm": "NGRAM"},
        ("--speculative-ngram-max-bfs-breadth 10", "set it to 1"),
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


def installed(folder: Path, name: str, version: str, plugin: str = "") -> Path:
    """A folder in which a distribution is installed; ``plugin`` is the body of its entry point."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if plugin:
        entry = f"[sglang.srt.plugins]\n{name} = {name}_module:register\n"
        (info / "entry_points.txt").write_text(entry)
        body = "".join(f"    {line}\n" for line in plugin.splitlines())
        (folder / f"{name}_module.py").write_text(f"def register():\n{body}")
    return folder


REPLACES = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
target = "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype"
HookRegistry.register(target, lambda **keywords: None, HookType.REPLACE)
"""
REGISTERS = """
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
ATTENTION_BACKENDS["inkling"] = register
"""
BREAKS = """
from sglang.srt import server_args
del server_args.add_attention_backend_choices
"""
# name of the case: environment, distributions beside, what the message must name
SURROUNDINGS: dict[str, tuple[dict[str, str], dict[str, tuple[str, str]], tuple[str, ...]]] = {
    "wrong variable": ({"INKLING_KERNELS": "cuda"}, {}, ("INKLING_KERNELS='cuda'", "reference")),
    "kernels without a GPU": ({"INKLING_KERNELS": "triton"}, {}, ("TRITON_INTERPRET=1",)),
    "plugin disabled": ({"SGLANG_PLUGINS": "other"}, {}, ("invalid choice: 'inkling'",)),
    "engine too new": ({}, {"sglang": ("0.6.0", "")}, ("SGLang 0.6.0", "below 0.6")),
    "engine too old": ({}, {"sglang": ("0.5.16", "")}, ("SGLang 0.5.16", "0.5.17 or newer")),
    "another plugin in our place": (
        {},
        {"rival": ("1", REPLACES)},
        ("the plugin rival", "configure_kv_cache_dtype", "SGLANG_PLUGINS"),
    ),
    "another backend of our name": (
        {},
        {"zrival": ("1", REGISTERS)},
        ("zrival_module", "a backend inkling", "SGLANG_PLUGINS"),
    ),
    "an engine without what we use": (
        {},
        {"abreaks": ("1", BREAKS)},
        ("add_attention_backend_choices", "could not be installed", "invalid choice: 'inkling'"),
    ),
}


@pytest.fixture(scope="module")
def surrounded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("surroundings")
    model = write_config(folder / "llama", LLAMA)
    start = options(model, "mxfp8", skip_tokenizer_init=True)
    envs = []
    for case, (env, beside, _) in SURROUNDINGS.items():
        for name, (version, plugin) in beside.items():
            env = env | {"PYTHONPATH": str(installed(folder / case, name, version, plugin))}
        envs.append(env)
    outcomes = Refusals().run([start] * len(envs), envs=envs)
    return dict(zip(SURROUNDINGS, outcomes, strict=True))


@pytest.mark.parametrize("case", SURROUNDINGS)
def test_wrong_surroundings_are_refused(surrounded: dict[str, Outcome], case: str) -> None:
    outcome = surrounded[case]
    assert outcome.status > 0, outcome.output[-3000:]
    assert "Load weight begin" not in outcome.output
    *_, expected = SURROUNDINGS[case]
    assert not [part for part in expected if part not in outcome.output], outcome.output[-3000:]


KEYWORD_CASES = ("recipe against a dtype", "unknown recipe", "page size")


@pytest.fixture(scope="module")
def keyword_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("keywords")
    starts = [keywords(folder, case) for case in KEYWORD_CASES]
    return dict(zip(KEYWORD_CASES, Refusals().run(starts, program="engine"), strict=True))


@pytest.mark.parametrize("case", KEYWORD_CASES)
def test_engine_keywords_are_refused_alike(keyword_outcomes: dict[str, Outcome], case: str) -> None:
    outcome = keyword_outcomes[case]
    assert outcome.status > 0
    *_, expected = CASES[case]
    assert not [part for part in expected if part not in outcome.output], outcome.output[-3000:]


def test_the_same_starts_without_a_fault_are_not_refused(tmp_path: Path) -> None:
    """The cases above fail for their reason and not for how they are started."""
    bases = {"llama": LLAMA, "gpt_oss": GPT_OSS}
    models = [write_config(tmp_path / name, base) for name, base in bases.items()]
    starts = [options(model, "mxfp8", skip_tokenizer_init=True) for model in models]
    for outcome in Refusals().run(starts):
        assert "Load weight begin" in outcome.output, outcome.output[-3000:]
