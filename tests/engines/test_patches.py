"""Every name of the engine that the plugin stands on exists in the engine's sources.

The sources are read, not imported: neither a GPU nor the engine's dependencies are needed. They are
those of the installed engine, and of each folder in SGLANG_SOURCES (separated like PATH; a folder
holds the package ``sglang``), so that one run can check several versions.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import inspect
import os
from functools import lru_cache
from pathlib import Path

import pytest

from inkling_backend.cli.model import WINDOW_POOL_MODELS
from inkling_backend.engines.sglang.patches import PATCHES, Patch, wanted


def _trees() -> list[Path]:
    roots = [Path(p) for p in os.environ.get("SGLANG_SOURCES", "").split(os.pathsep) if p]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        roots.append(Path(str(importlib.metadata.distribution("sglang").locate_file(""))))
    return [root for root in roots if (root / "sglang" / "srt").is_dir()]


TREES = _trees()
needs_sources = pytest.mark.skipif(
    not TREES, reason="SGLang is not installed and SGLANG_SOURCES names no source tree"
)
each_tree = pytest.mark.parametrize("tree", TREES, ids=lambda t: t.parent.name + "/" + t.name)

# Names used beside the hooked ones: (module, dotted name inside it).
USED = (
    ("sglang.srt.constants", "GPU_MEMORY_TYPE_KV_CACHE"),
    ("sglang.srt.entrypoints.engine", "Engine.server_args_class"),
    ("sglang.srt.layers.attention.attention_registry", "register_attention_backend"),
    ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata"),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.init_forward_metadata_out_graph",
    ),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.init_forward_metadata_in_graph",
    ),
    ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_cuda_graph_state"),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.get_cuda_graph_seq_len_fill_value",
    ),
    ("sglang.srt.layers.radix_attention", "RadixAttention.forward"),
    ("sglang.srt.configs.hybrid_arch", "mambaish_config"),
    ("sglang.srt.configs.model_config", "is_deepseek_dsa"),
    ("sglang.srt.mem_cache.allocation", "get_last_loc_torch"),
    ("sglang.srt.mem_cache.memory_pool", "unwrap_write_loc"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._create_buffers"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._clear_buffers"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._build_kv_buffer_descs"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._init_data_ptrs_and_strides"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._get_key_buffer"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._get_value_buffer"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.set_kv_buffer"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.move_kv_cache"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_kv_size_bytes"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_cpu_copy"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.load_cpu_copy"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool.get_contiguous_buf_infos"),
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator.is_hybrid_swa"),
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator.pool_page_size"),
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator.kv_cache_dtype_str"),
    ("sglang.srt.configs.model_config", "ModelConfig.get_swa_num_kv_heads"),
    ("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool._wait_for_layer"),
    ("sglang.srt.mem_cache.swa_memory_pool", "SWAKVPool.register_mapping"),
    ("sglang.srt.mem_cache.kv_cache_configurator", "KVCacheConfigurator.model_dtype"),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch.extend_num_tokens"),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardBatch.extend_seq_lens_cpu"),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardMode.is_target_verify"),
    ("sglang.srt.model_executor.forward_batch_info", "ForwardMode.is_draft_extend_v2"),
    ("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.verify_mask"),
    (
        "sglang.srt.layers.attention.base_attn_backend",
        "AttentionBackend.update_verify_buffers_to_fill_after_draft",
    ),
    ("sglang.srt.layers.attention.verify_mask", "maybe_create_verify_mask"),
    ("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool._init_kv_copy_and_warmup"),
    ("sglang.srt.model_executor.pool_configurator", "DefaultPoolConfigurator.__init__"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry._patched"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry.register"),
    ("sglang.srt.runtime_context", "get_context"),
    ("sglang.srt.runtime_context", "get_parallel"),
    ("sglang.srt.server_args", "add_attention_backend_choices"),
    ("sglang.srt.server_args", "add_deterministic_attention_backend_choices"),
    ("sglang.srt.server_args", "add_radix_supported_deterministic_attention_backend_choices"),
    ("sglang.srt.layers.attention.attention_registry", "ATTENTION_BACKENDS"),
    ("sglang.srt.plugins.hook_registry", "HookRegistry._hooks"),
    ("sglang.srt.plugins.hook_registry", "HookType.REPLACE"),
    ("sglang.kernels.ops.attention.score_mod", "relative_bias_score_mod"),
    ("sglang.srt.environ", "Envs.SGLANG_OPT_INKLING_MXFP8_FUSED_QUANT_STORE"),
    ("sglang.srt.runtime_context", "get_server_args"),
    ("sglang.srt.runtime_context", "get_model"),
)


@lru_cache(maxsize=64)
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _file(tree: Path, module: str) -> Path:
    path = tree.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The statement that binds ``name``, inside if and try too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            return node
        if isinstance(node, ast.ImportFrom) and any(
            name == (alias.asname or alias.name) for alias in node.names
        ):
            return node
        for inner in ("body", "orelse", "finalbody"):
            if isinstance(node, ast.If | ast.Try) and (
                found := _find(getattr(node, inner, []), name)
            ):
                return found
    return None


def _resolve(tree: Path, module: str, dotted: str) -> ast.stmt | None:
    path = _file(tree, module)
    if not path.is_file():
        return None
    body: list[ast.stmt] = _parse(path).body
    node: ast.stmt | None = None
    for name in dotted.split("."):
        node = _find(body, name)
        if node is None:
            return None
        body = node.body if isinstance(node, ast.ClassDef) else []
    return node


def _split(target: str) -> tuple[str, str]:
    """Dotted target -> (module, name inside it); classes start with a capital."""
    parts = target.split(".")
    first = next((i for i, p in enumerate(parts) if p[:1].isupper()), len(parts) - 1)
    return ".".join(parts[:first]), ".".join(parts[first:])


def _is_new(tree: Path) -> bool:
    return _file(tree, "sglang.srt.arg_groups.resolution_hooks").is_file()


def _engine_function(tree: Path, patch: Patch) -> ast.stmt | None:
    if patch.how != "step":
        return _resolve(tree, *_split(patch.target))
    if not _is_new(tree):
        return _resolve(tree, "sglang.srt.server_args", f"ServerArgs._{patch.target}")
    folder = tree / "sglang" / "srt" / "arg_groups"
    hooks = (folder / "resolution_hooks.py").read_text()
    assert f'"{patch.target}"' in hooks, f"{patch.target} is no step that a plugin may hook"
    assert f"run_hook({patch.target}, server_args)" in (folder / "pipeline.py").read_text()
    for path in sorted(folder.glob("*_hook.py")):
        if node := _find(_parse(path).body, patch.target):
            return node
    return None


@needs_sources
@each_tree
def test_hooked_functions_exist(tree: Path) -> None:
    for patch in wanted(_is_new(tree)):
        node = _engine_function(tree, patch)
        assert isinstance(node, ast.FunctionDef), f"{patch.target} is not a function in {tree}"


@needs_sources
@each_tree
def test_parameters_of_hooked_functions(tree: Path) -> None:
    """Hooks that name the engine's parameters find them, in this order."""
    expected = {
        "add_cli_args": ["parser"],
        "from_cli_args": ["cls", "args"],
        "get_last_loc": ["req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"],
        "_compute_cell_size": ["self", "kvc", "num_layers"],
        "__init__": ["self", "kvc"],
        "_profile_available_bytes": ["self", "pre_model_load_memory"],
        "_build_mha_kv_pool": ["self"],
        "_build_hybrid_swa_kv_pool": ["self"],
        "configure_kv_cache_dtype": [],
        "create_decode_backend": ["self"],
        "create_draft_extend_backend": ["self"],
    }
    if _is_new(tree):
        expected["build_kv_host_pool"] = []
    keywords = {
        "_build_mha_kv_pool": {"max_total_num_tokens", "mha_pool_class", "quant_method"},
        "_build_hybrid_swa_kv_pool": {"mha_pool_class"},
        "configure_kv_cache_dtype": {"server_args_kv_cache_dtype", "model_dtype"},
        "build_kv_host_pool": {"kv_pool", "page_size", "host_size", "mtp_draft_device_pools"},
    }
    checked = set()
    for patch in wanted(_is_new(tree)):
        if patch.how in ("step", "model"):
            continue
        node = _engine_function(tree, patch)
        assert isinstance(node, ast.FunctionDef)
        assert [arg.arg for arg in node.args.args] == expected[node.name], patch.target
        names = {arg.arg for arg in node.args.kwonlyargs}
        assert keywords.get(node.name, set()) <= names, patch.target
        checked.add(node.name)
    assert checked == set(expected)


@needs_sources
@each_tree
def test_what_the_layers_of_inkling_ask(tree: Path) -> None:
    """`versions.show_inkling_layers` answers what they ask, and they hand over what we take."""
    module = "sglang.srt.models.inkling_common.attn"
    asked = ["serving_attention_backend", "get_model"] if _is_new(tree) else ["get_server_args"]
    old = _resolve(tree, module, "serving_attention_backend") is None
    assert old is not _is_new(tree)
    for name in asked:
        assert _resolve(tree, module, name), name
    node = _resolve(tree, module, "InklingAttention.forward")
    assert node is not None
    source = ast.unparse(node)
    assert "attention_backend in ('fa4', 'triton')" in source
    assert all(f"{name}(" in source for name in asked)
    assert "kv_cache_dtype == 'mxfp8'" in source
    for keyword in ("score_mod=triton_relative_bias_score_mod", "aux_tensors=[rel_logits]"):
        assert keyword in source
    for key in ("q_descale", "k_descale", "v_descale"):
        assert f"['{key}']" in source
    config = _resolve(tree, "sglang.srt.configs.inkling", "InklingMMConfig")
    assert config is not None
    assert "model_type = 'inkling_mm_model'" in ast.unparse(config)


@needs_sources
@each_tree
def test_used_names_exist(tree: Path) -> None:
    missing = [f"{module}.{name}" for module, name in USED if not _resolve(tree, module, name)]
    assert not missing, f"not in {tree}: {missing}"


@needs_sources
@each_tree
@pytest.mark.parametrize("builder", ["_build_mha_kv_pool", "_build_hybrid_swa_kv_pool"])
def test_the_pool_passes_through_the_engines_builder(tree: Path, builder: str) -> None:
    """The pool class reaches the constructor: the builder replaces it only for "mxfp8"."""
    module = "sglang.srt.mem_cache.kv_cache_configurator"
    node = _resolve(tree, module, f"KVCacheConfigurator.{builder}")
    assert node is not None
    source = ast.unparse(node)
    assert "kv_cache_dtype_str == 'mxfp8'" in source
    assert "else mha_pool_class" in source


@needs_sources
def test_the_engine_has_a_pool_for_windows_of_the_models_that_are_said_to() -> None:
    """In the newest of the engines."""
    tree = max(TREES, key=_is_new)
    listed = _resolve(tree, "sglang.srt.configs.model_config", "is_hybrid_swa_model")
    sinks = _resolve(tree, "sglang.srt.configs.model_config", "SWA_SINK_ARCHS")
    if sinks is None:
        pytest.skip("this engine is older than the list")
    assert listed is not None
    assert "*SWA_SINK_ARCHS" in ast.unparse(listed)
    names = ast.unparse(listed) + ast.unparse(sinks)
    assert all(f"'{name}'" in names for name in WINDOW_POOL_MODELS)


def test_the_ledger_is_complete() -> None:
    targets = [patch.target for patch in PATCHES]
    assert len(set(targets)) == len(targets)
    for patch in PATCHES:
        assert patch.why, patch.target
        assert patch.until, patch.target
        kinds = ("step", "before", "after", "around", "replace", "model")
        assert patch.how in kinds, patch.target
        assert len(inspect.signature(patch.hook).parameters) >= 2, patch.target
