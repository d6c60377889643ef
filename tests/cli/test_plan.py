"""Planning from config.json alone, against the sizes that the pool is built with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from inkling_backend import RECIPES, CacheLayout
from inkling_backend.cache import KVCachePool
from inkling_backend.cli.app import app
from inkling_backend.cli.plan import GPU_MEMORY_MIB, ORDER, count_weights, plan, read_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
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
    config = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run(*arguments: str) -> tuple[int, str]:
    """Exit status and output of the command."""
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


def test_json_has_every_recipe_and_the_pools_own_sizes(tmp_path: Path) -> None:
    write(tmp_path)
    status, output = run("--model", str(tmp_path), "--gpu", "h200", "--context", "32768", "--json")
    assert status == 0
    content = json.loads(output)
    rows = {row["recipe"]: row for row in content["recipes"]}
    assert tuple(rows) == ORDER
    for name, recipe in RECIPES.items():
        row = rows[name]
        layout = CacheLayout(recipe.k, recipe.v, 8, 128, 128)
        pool = KVCachePool(layout, 32, 1, "meta")
        held = sum(buffer.tensor.nbytes for buffer in pool.buffers())
        assert row["bytes_per_token"] * layout.page_size == held
        assert row["tokens"] == content["cache_bytes"] // row["bytes_per_token"]
        assert row["requests"] == row["tokens"] // 32768
        bits = recipe.k.bits_per_element + recipe.v.bits_per_element
        assert row["bits_per_element"] * 2 == bits
    assert rows["fp8"]["bytes_per_token"] * 2 == rows["bf16"]["bytes_per_token"]
    total = GPU_MEMORY_MIB["H200"] * 2**20
    assert content["cache_bytes"] + content["weight_bytes"] == int(total * 0.88)


def test_weights_of_a_known_model(tmp_path: Path) -> None:
    assert count_weights(read_model(write(tmp_path))) == 2 * 8_030_261_248


def test_tensor_parallel_splits_heads_and_weights(tmp_path: Path) -> None:
    shape = read_model(write(tmp_path))
    one, two, many = (plan(shape, memory_bytes=80 * 2**30, tp=n) for n in (1, 2, 16))
    assert two.row("mxfp8").bytes_per_token * 2 == one.row("mxfp8").bytes_per_token
    assert two.weight_bytes * 2 == one.weight_bytes
    # More ranks than KV heads: each keeps a whole one.
    assert many.row("mxfp8").bytes_per_token * 8 == one.row("mxfp8").bytes_per_token


def test_windowed_layers_keep_their_window_only(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"] * 16
    shape = read_model(write(tmp_path, layer_types=kinds, sliding_window=1024))
    assert (shape.full_layers, shape.window_layers, shape.window) == (16, 16, 1024)
    row = plan(shape, memory_bytes=80 * 2**30, context=131072).row("nvfp4")
    layer = row.bytes_per_token // 32
    request = layer * 16 * (131072 + 1024)
    assert row.requests == plan(shape, memory_bytes=80 * 2**30).cache_bytes // request


def test_layers_without_a_cache_cost_nothing(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 24 + ["full_attention"] * 8
    shape = read_model(write(tmp_path, layer_types=kinds))
    full = read_model(write(tmp_path))
    rows = [plan(s, memory_bytes=80 * 2**30).row("mxfp8") for s in (shape, full)]
    assert rows[0].bytes_per_token * 4 == rows[1].bytes_per_token


def test_a_recipe_that_does_not_fit_says_why(tmp_path: Path) -> None:
    write(tmp_path, head_dim=80)
    status, output = run("--model", str(tmp_path), "--memory-gib", "80", "--json")
    rows = {row["recipe"]: row for row in json.loads(output)["recipes"]}
    assert status == 0
    assert "head_dim 80 does not fit mxfp8" in rows["mxfp8"]["reason"]
    assert "reason" not in rows["nvfp4"]


def test_the_table_fits_eighty_columns(tmp_path: Path) -> None:
    write(tmp_path)
    status, output = run("--model", str(tmp_path / "config.json"), "--gpu", "H100")
    assert status == 0
    assert max(map(len, output.splitlines())) <= 80
    for name in ORDER:
        assert name in output
    assert "3.56x" in output


BAD: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "no memory": ({}, (), "one of --gpu and --memory-gib"),
    "both memories": ({}, ("--gpu", "H100", "--memory-gib", "80"), "one of --gpu"),
    "unknown GPU": ({}, ("--gpu", "H300"), "known: A100-40GB"),
    "MLA": ({"kv_lora_rank": 512}, ("--gpu", "H100"), "MLA"),
    "no decoder": ({"num_hidden_layers": None}, ("--gpu", "H100"), "num_hidden_layers"),
    "experts": ({"num_experts": 64}, ("--gpu", "H100"), "--weights-gib"),
    "too large": ({"num_hidden_layers": 800}, ("--gpu", "H100"), "larger --tp"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_say_what_to_do(case: str, tmp_path: Path) -> None:
    changes, arguments, words = BAD[case]
    status, output = run("--model", str(write(tmp_path, **changes)), *arguments)
    assert status == 1
    assert words in output
    assert "Traceback" not in output


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    status, output = run("--model", str(tmp_path / "nothing"), "--gpu", "H100")
    assert status == 1
    assert "nothing/config.json" in output.replace("\n", "")
