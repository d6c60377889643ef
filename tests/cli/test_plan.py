"""Planning from config.json alone, against the sizes that the pool is built with."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inkling_backend import RECIPES, CacheLayout
from inkling_backend.cache import KVCachePool
from inkling_backend.cli.app import app
from inkling_backend.cli.model import PlanError, count_weights, read_model
from inkling_backend.cli.plan import GPU_MEMORY_MIB, ORDER, plan

ROW = ["recipe", "bits_per_element", "bytes_per_token", "tokens", "requests"]
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


def write(folder: Path, **changes: Any) -> Path:
    """A config.json like Llama 3.1 8B's, with changes; None leaves a key out."""
    return write_config(folder, LLAMA | changes)


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    kept = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def run(*arguments: str, columns: int = 80) -> tuple[int, str, str]:
    """Exit status, output and errors of the command."""
    result = CliRunner().invoke(app, ["plan", *arguments], env={"COLUMNS": str(columns)})
    return result.exit_code, result.stdout, result.stderr


def test_json_has_every_recipe_and_the_pools_own_sizes(tmp_path: Path) -> None:
    arguments = ("--model", str(write(tmp_path)), "--gpu", "h200", "--context", "32768")
    status, output, errors = run(*arguments, "--json")
    assert (status, errors) == (0, "")
    content = json.loads(output)
    assert list(content) == ["recipes"]
    assert all(list(row) == ROW for row in content["recipes"])
    rows = {row["recipe"]: row for row in content["recipes"]}
    assert tuple(rows) == ORDER
    cache = int(GPU_MEMORY_MIB["H200"] * 2**20 * 0.88) - 2 * 8_030_261_248
    for name, recipe in RECIPES.items():
        row = rows[name]
        layout = CacheLayout(recipe.k, recipe.v, 8, 128, 128)
        pool = KVCachePool(layout, 32, 1, "meta")
        held = sum(buffer.tensor.nbytes for buffer in pool.buffers())
        assert row["bytes_per_token"] * layout.page_size == held
        assert row["tokens"] == cache // held * layout.page_size
        assert row["requests"] == row["tokens"] // 32768
        bits = recipe.k.bits_per_element + recipe.v.bits_per_element
        assert row["bits_per_element"] * 2 == bits
    assert rows["fp8"]["bytes_per_token"] * 2 == rows["bf16"]["bytes_per_token"]


def test_weights_of_a_known_model(tmp_path: Path) -> None:
    assert count_weights(read_model(write(tmp_path))) == 2 * 8_030_261_248


def test_tensor_parallel_splits_heads_and_weights(tmp_path: Path) -> None:
    shape = read_model(write(tmp_path))
    one, two, many = (plan(shape, memory_bytes=80 * 2**30, tp=n) for n in (1, 2, 16))
    assert two.row("mxfp8").bytes_per_token * 2 == one.row("mxfp8").bytes_per_token
    assert two.weight_bytes * 2 == one.weight_bytes
    # More ranks than KV heads: each keeps a whole one.
    assert many.row("mxfp8").bytes_per_token * 8 == one.row("mxfp8").bytes_per_token


# Configurations as they are published, without what does not matter here; then layers with the
# whole context, layers with a window, the window, KV heads and head_dim.
PUBLISHED: dict[str, tuple[dict[str, Any], tuple[int, int, int, int, int]]] = {
    "Qwen3 8B": (
        {"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "head_dim": 128}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "use_sliding_window": False},
        (36, 0, 0, 8, 128),
    ),
    # Names no heads at all: its class has them.
    "Gemma 3 4B": (
        {"model_type": "gemma3"}
        | {"text_config": {"model_type": "gemma3_text", "hidden_size": 2560}}
        | {"vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}},
        (4, 22, 4096, 4, 256),
    ),
    "Gemma 2 9B": (
        {"model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16}
        | {"num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096},
        (21, 21, 4096, 8, 256),
    ),
    "GPT-OSS 20B": (
        {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_hidden_layers": 24}
        | {"head_dim": 64, "sliding_window": 128}
        | {"num_attention_heads": 64, "num_key_value_heads": 8},
        (12, 12, 128, 8, 64),
    ),
    "Mistral 7B": (
        {"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"hidden_size": 4096, "num_key_value_heads": 8, "sliding_window": 4096},
        (0, 32, 4096, 8, 128),
    ),
    "Qwen3-Next 80B": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4}
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
        (12, 0, 0, 2, 256),
    ),
    "Jamba": (
        {"model_type": "jamba", "num_hidden_layers": 32, "hidden_size": 4096}
        | {"attn_layer_period": 8, "attn_layer_offset": 4}
        | {"num_attention_heads": 32, "num_key_value_heads": 8},
        (4, 0, 0, 8, 128),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str, tmp_path: Path) -> None:
    config, expected = PUBLISHED[name]
    shape = read_model(write_config(tmp_path, config))
    found = (shape.full_layers, shape.window_layers, shape.window)
    assert (*found, shape.num_kv_heads, shape.head_dim) == expected
    row = plan(shape, memory_bytes=80 * 2**30, weight_bytes=0).row("nvfp4")
    recipe = RECIPES["nvfp4"]
    dim = expected[4]
    layout = CacheLayout(recipe.k, recipe.v, expected[3], dim, dim)
    windows = expected[1] * (0.8 if name == "GPT-OSS 20B" else 1)
    assert row.bytes_per_token == math.ceil(layout.bytes_per_token * (expected[0] + windows))


def test_two_pools_fill_the_memory(tmp_path: Path) -> None:
    shape = read_model(write_config(tmp_path, PUBLISHED["GPT-OSS 20B"][0]))
    whole = replace(shape, window_pool=False)
    sizes = {"memory_bytes": 2**30, "mem_fraction": 1.0, "weight_bytes": 0}
    for context in (64, 32768):
        two, one = (plan(each, context=context, **sizes) for each in (shape, whole))  # type: ignore[arg-type]
        for name in ORDER:
            row, layer = two.row(name), two.row(name).layer_bytes
            rest = 2**30 - 12 * layer * (row.tokens + row.window_tokens)
            # Tokens and 0.8 times as many are rounded down to pages, the latter once more.
            assert 12 * layer * 128 * 2.8 > rest >= 0
            assert row.window_tokens == int(row.tokens * 0.8) // 128 * 128
            assert row.tokens > one.row(name).tokens * 1.1
            # Short requests are all window.
            most = row.window_tokens // 64 if context == 64 else row.tokens // context
            assert row.requests == most
    written = dict(PUBLISHED["GPT-OSS 20B"][0], layer_types=["sliding_attention"] * 24)
    assert not read_model(write_config(tmp_path, written)).window_pool, "no pool but that one"


def test_windows_and_states_are_noted(tmp_path: Path) -> None:
    arguments = ("--memory-gib", "80", "--weights-gib", "10", "--json")
    for name, words in {
        "GPT-OSS 20B": ("12 of 24 layers see 128 tokens", "1.11x", "in 12 with a window"),
        "Gemma 2 9B": ("21 of 42 layers see 4,096 tokens", "whole context"),
        "Mistral 7B": ("32 of 32 layers see 4,096 tokens", "whole context"),
        "Qwen3-Next 80B": ("36 of 48 layers keep a recurrent state", "not served"),
    }.items():
        write_config(tmp_path, PUBLISHED[name][0])
        status, output, errors = run("--model", str(tmp_path), *arguments, columns=300)
        assert status == 0
        assert len(json.loads(output)["recipes"]) == len(ORDER)
        assert all(word in errors for word in words), errors


def test_a_type_that_transformers_does_not_know_needs_the_weights(tmp_path: Path) -> None:
    write(tmp_path, model_type="of_tomorrow")
    status, _, errors = run("--model", str(tmp_path), "--gpu", "H100")
    assert status == 1
    assert "--weights-gib" in errors
    status, output, _ = run("--model", str(tmp_path), "--gpu", "H100", "--weights-gib", "15")
    assert status == 0
    assert "67,584" in output


def test_a_recipe_that_does_not_fit_says_why(tmp_path: Path) -> None:
    write(tmp_path, head_dim=80)
    arguments = ("--model", str(tmp_path), "--memory-gib", "80")
    status, output, errors = run(*arguments, "--json", columns=300)
    rows = {row["recipe"]: row for row in json.loads(output)["recipes"]}
    assert status == 0
    assert rows["mxfp8"] | {"bits_per_element": 0} == dict.fromkeys(ROW, 0) | {"recipe": "mxfp8"}
    assert rows["nvfp4"]["tokens"] > 0
    assert "note: mxfp8: head_dim 80 does not fit mxfp8" in errors
    assert "does not fit" in run(*arguments)[1]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_and_the_chart_fit(columns: int, tmp_path: Path) -> None:
    write(tmp_path)
    arguments = ("--model", str(tmp_path / "config.json"), "--gpu", "H100")
    status, output, _ = run(*arguments, columns=columns)
    assert status == 0
    assert max(map(len, output.splitlines())) <= columns
    assert "3.56x" in output
    assert "…" not in output
    bars = {line.split()[0]: line.count("█") for line in output.splitlines() if "█" in line}
    assert tuple(bars) == ORDER
    assert bars["nvfp4"] > bars["mxfp8-nvfp4"] > bars["mxfp8"] > bars["bf16"] > 0
    assert bars["nvfp4"] > columns // 2


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "no memory": ({}, (), "one of --gpu and --memory-gib"),
    "both memories": ({}, ("--gpu", "H100", "--memory-gib", "80"), "one of --gpu"),
    "unknown GPU": ({}, ("--gpu", "H300"), "known: A10"),
    "MLA": ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, ("--gpu", "H100"), "MLA"),
    "encoder": ({"model_type": "t5"}, ("--gpu", "H100"), "encoder-decoder"),
    "no layers": ({"model_type": "x", "num_hidden_layers": 0}, ("--gpu", "H100"), "hidden_layers"),
    "no decoder": ({"model_type": "x", "hidden_size": None}, ("--gpu", "H100"), "hidden_size"),
    "two head sizes": ({"swa_head_dim": 64}, ("--gpu", "H100"), "heads of their own size"),
    "unknown layers": ({"layer_types": ["odd"] * 32}, ("--gpu", "H100"), "odd"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, ("--gpu", "H100"), "(fp8)"),
    "too large": ({"num_hidden_layers": 800}, ("--gpu", "H100"), "larger --tp"),
    "heads": ({}, ("--gpu", "H100", "--tp", "3"), "--tp that divides"),
    "context": ({}, ("--gpu", "H100", "--context", "200000"), "smaller --context"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_say_what_to_do(case: str, tmp_path: Path) -> None:
    changes, arguments, words = BAD[case]
    status, output, errors = run("--model", str(write(tmp_path, **changes)), *arguments)
    assert (status, output) == (1, "")
    assert words in errors
    assert errors.startswith("inkling-backend plan: ")
    assert "Traceback" not in errors


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    status, _, errors = run("--model", str(tmp_path / "nothing"), "--gpu", "H100")
    assert status == 1
    assert "nothing/config.json" in errors
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(PlanError, match="got a list"):
        read_model(tmp_path)


def test_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    status, _, errors = run("--model", str(write(tmp_path)), "--gpu", "H100")
    assert status == 1
    assert "plan needs transformers: pip install 'inkling-backend[bench]'" in errors


def test_layers_with_recipes_of_their_own(tmp_path: Path) -> None:
    arguments = ("--model", str(write(tmp_path)), "--gpu", "h200", "--json")
    plain = {row["recipe"]: row for row in json.loads(run(*arguments)[1])["recipes"]}
    chosen = ("--layer-recipes", "0-1:mxfp8,31:bf16")
    status, output, _ = run(*arguments, *chosen)
    assert status == 0
    rows = {row["recipe"]: row for row in json.loads(output)["recipes"]}
    assert [rows[name] for name in ("bf16", "fp8")] == [plain[name] for name in ("bf16", "fp8")]
    assert rows["nvfp4"]["bytes_per_token"] == 29 * 1152 + 2 * 2112 + 4096
    assert rows["nvfp4"]["bits_per_element"] == (29 * 4.5 + 2 * 8.25 + 16) / 32
    assert rows["nvfp4"]["tokens"] < plain["nvfp4"]["tokens"]


def test_sink_tokens(tmp_path: Path) -> None:
    arguments = ("--model", str(write(tmp_path)), "--gpu", "h200", "--json")
    plain = {row["recipe"]: row for row in json.loads(run(*arguments)[1])["recipes"]}
    status, output, _ = run(*arguments, "--sink-tokens", "2", "--layer-recipes", "31:bf16")
    assert status == 0
    rows = {row["recipe"]: row for row in json.loads(output)["recipes"]}
    assert [rows[name] for name in ("bf16", "fp8")] == [plain[name] for name in ("bf16", "fp8")]
    # Two rows of 4096 bytes for every 128 tokens.
    assert rows["nvfp4"]["bytes_per_token"] == 31 * (1152 + 64) + 4096
    assert rows["nvfp4"]["bits_per_element"] == (31 * (4.5 + 0.25) + 16) / 32
    assert run(*arguments, "--sink-tokens", "9")[0] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("32:mxfp8", "names layer 32, but the model has layers 0 to 31"),
        ("0:mxfp9", "unknown recipe 'mxfp9'"),
        ("first:mxfp8", "expected LAYERS:RECIPE"),
    ],
)
def test_wrong_recipes_of_single_layers(text: str, words: str, tmp_path: Path) -> None:
    status, _, errors = run(
        "--model", str(write(tmp_path)), "--gpu", "h200", "--layer-recipes", text, columns=300
    )
    assert status != 0
    assert words in errors


def test_recipes_of_single_layers_need_one_pool(tmp_path: Path) -> None:
    shape = read_model(write_config(tmp_path, PUBLISHED["GPT-OSS 20B"][0]))
    with pytest.raises(PlanError, match="a pool for layers with a window"):
        plan(shape, memory_bytes=80 * 2**30, layer_recipes={0: RECIPES["mxfp8"]}, weight_bytes=1)
