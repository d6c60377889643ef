"""Everything that differs between engine versions, in one place.

Tested: 0.5.17 (GPU host) and 0.5.23 (CPU). A difference is found by what the engine offers, not by
its version number, so that versions between them work as far as they look like one of the two.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

# Versions to serve with: the oldest, and the first that is too new.
OLDEST_ENGINE, NEXT_ENGINE = (0, 5, 17), (0, 6)

Step = Callable[[Any, Callable[[Any], None]], None]


def engine_version() -> str:
    """Version of the installed engine."""
    return metadata.version("sglang")


def version_reason(version: str) -> str | None:
    """Why an engine of this version cannot be served with, None if it can."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if OLDEST_ENGINE <= numbers < NEXT_ENGINE:
        return None
    oldest, following = (".".join(map(str, numbers)) for numbers in (OLDEST_ENGINE, NEXT_ENGINE))
    return f"SGLang {version} is not supported: install {oldest} or newer, below {following}"


def has_resolution_pipeline() -> bool:
    """Whether arguments are resolved by ``arg_groups.pipeline`` (0.5.23).

    In 0.5.17 the same steps are methods of ``ServerArgs`` that run inside its constructor.
    """
    return importlib.util.find_spec("sglang.srt.arg_groups.resolution_hooks") is not None


def runs_on_cpu() -> bool:
    """Whether the engine's paged allocation works without Triton kernels (0.5.23)."""
    return has_resolution_pipeline()


def has_host_pools() -> bool:
    """Whether the host tier's pools are built in one place that can be changed (0.5.23)."""
    return importlib.util.find_spec("sglang.srt.mem_cache.pool_host") is not None


def step_target(step: str) -> str:
    """Dotted name of the function behind an argument resolution step."""
    if has_resolution_pipeline():
        return f"resolution step {step}"
    return f"sglang.srt.server_args.ServerArgs._{step}"


def hook_resolution_step(step: str, hook: Step) -> str | None:
    """Wrap a step of argument resolution with ``hook(server_args, previous)``.

    Returns:
        The target in the engine's ``HookRegistry``, or None if the engine has its own registry of
        steps.
    """
    if has_resolution_pipeline():
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(step)(hook)
        return None
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def around(original: Callable[[Any], None], server_args: Any) -> None:
        hook(server_args, original)

    HookRegistry.register(step_target(step), around, HookType.AROUND)
    return step_target(step)


def view(server_args: Any) -> Any:
    """Read-only view of the arguments as resolved so far."""
    from sglang.srt.arg_groups import overrides

    make = getattr(overrides, "resolving_view", None) or overrides.resolved_view
    return make(server_args)


def set_fields(server_args: Any, **fields: Any) -> None:
    """Decide fields of the arguments while they are being resolved."""
    from sglang.srt.arg_groups import overrides

    declare = getattr(overrides, "declare_resolution", None)
    if declare is not None:
        declare(server_args, "inkling_backend", **fields)
        return
    for name, value in fields.items():
        setattr(server_args, name, value)


def model_config(server_args: Any) -> Any:
    """The engine's ``ModelConfig`` of these arguments (memoized by the engine)."""
    if has_resolution_pipeline():
        from sglang.srt.arg_groups.overrides import model_config_of

        return model_config_of(server_args)
    return server_args.get_model_config()


def attention_backends(view: Any) -> tuple[str | None, str | None]:
    """Names of the (prefill, decode) attention backends of an arguments view."""
    both = view.attention_backend
    return view.prefill_attention_backend or both, view.decode_attention_backend or both


@contextmanager
def shown_as(server_args: Any, backend: str, name: str) -> Iterator[None]:
    """While it is open, the engine's checks by model find ``name`` where ``backend`` is chosen."""
    owner: Any
    if has_resolution_pipeline():
        from sglang.srt.arg_groups import model_hook

        owner, attribute = model_hook, "attention_backends_of"
    else:
        owner, attribute = type(server_args), "_resolved_attention_backends"
    original = getattr(owner, attribute)

    def shown(arguments: Any) -> tuple[str | None, ...]:
        return tuple(name if b == backend else b for b in original(arguments))

    setattr(owner, attribute, shown)
    try:
        yield
    finally:
        setattr(owner, attribute, original)


def attention_tp_size(view: Any) -> int:
    """Ranks that share the attention heads."""
    attention_dp = getattr(view, "attn_dp_size", None)
    if attention_dp is None:
        attention_dp = view.dp_size if view.enable_dp_attention else 1
    return max(1, view.tp_size // attention_dp // (view.attn_cp_size or 1))


def active_attention_backends() -> tuple[str | None, str | None]:
    """Names of the (prefill, decode) attention backends of this scheduler process."""
    from sglang.srt import runtime_context

    if hasattr(runtime_context, "attention_backends"):
        return runtime_context.attention_backends()
    return attention_backends(runtime_context.get_context().server_args)


def active_attention_tp_size() -> int:
    """Ranks that share the attention heads of this scheduler process."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_size


def is_first_rank() -> bool:
    """Whether this scheduler process speaks for the others in logs."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank == 0 and get_parallel().pp_rank == 0


def active_server_args() -> Any:
    """The ``ServerArgs`` record of this scheduler process."""
    from sglang.srt.runtime_context import get_context

    return get_context().server_args


def windows_have_a_pool(arguments: Any, model: Any) -> bool:
    """Whether the engine keeps layers with a window in a pool of their own, as by default.

    Args:
        arguments: the engine's arguments.
        model: its model configuration.
    """
    one_pool = getattr(arguments, "disable_hybrid_swa_memory", False)
    return bool(getattr(model, "is_hybrid_swa", False)) and not one_pool


def verified_tokens() -> int:
    """Tokens of a request that this scheduler process verifies at once; 1 without speculation."""
    from sglang.srt.runtime_context import get_spec

    spec = get_spec()
    return int(spec.speculative_num_draft_tokens) if spec.speculative_algorithm else 1


def verifies_trees() -> bool:
    """Whether what this scheduler process verifies are trees: drafts of n-grams."""
    from sglang.srt.runtime_context import get_spec

    return str(get_spec().speculative_algorithm).upper() == "NGRAM"


def unread_verify_mask(max_batch: int, tokens: int, device: Any) -> Any:
    """Room for the engine's mask of drafted tokens, the smallest that it can fill."""
    from sglang.srt.layers.attention.verify_mask import maybe_create_verify_mask

    return maybe_create_verify_mask(
        is_draft_runner=False,
        skip_prefill=False,
        max_bs=max_batch,
        max_context_len=0,
        num_draft_tokens=tokens,
        device=device,
        is_read=False,
    )


def draft_of(kvc: Any) -> tuple[Any, int] | None:
    """Configuration of the draft model of a ``KVCacheConfigurator``, and its layers with a cache.

    None without a draft model, or where the runner is its own.
    """
    algorithm, layers = kvc.spec_algorithm, kvc.spec_aux_config.eagle_draft_num_layers
    drafts = algorithm.is_eagle() or algorithm.is_standalone()
    if kvc.is_draft_worker or not drafts or not layers:
        return None
    known = getattr(kvc.spec_aux_config, "draft_model_config", None)
    if known is not None:
        return known, int(layers)
    from sglang.srt.configs.model_config import ModelConfig

    arguments = kvc.server_args
    path, revision = (
        getattr(arguments, f"speculative_draft_model_{name}") for name in ("path", "revision")
    )
    config = ModelConfig.from_server_args(
        arguments, model_path=path, model_revision=revision, is_draft_model=True
    )
    return config, int(layers)


def set_bytes_per_token(sizer: Any, layer_bytes: int) -> None:
    """Let a ``HybridSWAPoolConfigurator`` count so many bytes of a token in each layer."""
    sizer._full_per_token = sizer._swa_per_token = layer_bytes
    recompute = getattr(sizer, "_recompute_cell_size", None)
    if recompute is not None:
        recompute()
        return
    # 0.5.17 does this where it is constructed.
    ratio = sizer._swa_full_tokens_ratio if sizer._full_layers_num else 1
    layers = sizer._full_layers_num + sizer._draft_full_layers_num
    layers += sizer._draft_swa_full_layers_num + ratio * sizer._swa_layers_num
    sizer._cell_size = layer_bytes * layers


def model_traits(model: Any) -> list[str]:
    """Kinds of model that the engine treats apart and this backend does not serve."""
    from sglang.srt.configs import hybrid_arch
    from sglang.srt.configs import model_config as configs

    found = []
    # Inkling's states are those of short convolutions, which the engine keeps beside its pools; and
    # they cannot be asked for before the arguments are resolved.
    if not is_inkling(model) and hybrid_arch.mambaish_config(model) is not None:
        found.append("hybrid linear-attention (state-space) layers")
    for function, what in (
        ("is_deepseek_dsa", "DeepSeek sparse attention layers"),
        ("is_deepseek_v4", "DeepSeek V4 compressed attention layers"),
        ("is_minimax_sparse", "MiniMax sparse attention layers"),
    ):
        recognise = getattr(configs, function, None)
        if recognise is not None and recognise(model.hf_config):
            found.append(what)
    return found


def is_inkling(model: Any) -> bool:
    """Whether a model configuration is that of Inkling, whose layers bring relative biases."""
    kind = getattr(getattr(model, "hf_config", None), "model_type", None)
    return str(kind).startswith("inkling_")


def inkling_layers(model: Any) -> Any:
    """The module of the attention layers of a loaded Inkling model; None for any other model.

    Importing it takes seconds, and libraries that other models do not need.
    """
    if not is_inkling(model):
        return None
    from sglang.srt.models.inkling_common import attn

    return attn


def stores_inkling_kv() -> bool:
    """Whether Inkling's layers leave the quantization of K and V to the pool, as by default."""
    from sglang.srt.environ import envs

    return bool(envs.SGLANG_OPT_INKLING_MXFP8_FUSED_QUANT_STORE.get())


def relative_bias_score_mod() -> Any:
    """The ``score_mod`` that Inkling's layers hand to the engine's triton backend."""
    from sglang.kernels.ops.attention.score_mod import relative_bias_score_mod as score_mod

    return score_mod


class _Shown:
    """A record of the engine, some of its fields shown otherwise."""

    def __init__(self, record: Any, fields: Mapping[str, Any]) -> None:
        self.__dict__.update(fields, _record=record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)


def show_inkling_layers(attn: Any, backend: str, model_fields: Mapping[str, Any]) -> None:
    """Let Inkling's attention layers, in the module ``attn``, find ``backend`` to serve them.

    Args:
        model_fields: arguments about the model, like ``kv_cache_dtype``, to be shown otherwise.
    """
    from sglang.srt import runtime_context

    if hasattr(attn, "serving_attention_backend"):
        attn.serving_attention_backend = lambda forward_batch: backend
        attn.get_model = lambda: _Shown(runtime_context.get_model(), model_fields)
        return
    fields = {"attention_backend": backend, **model_fields}
    attn.get_server_args = lambda: _Shown(runtime_context.get_server_args(), fields)


def has_sinks(model: Any) -> bool:
    """Whether a layer of the model hands attention sinks to its attention, by the names that the
    engine's models keep them under."""
    names = ("sinks", "attention_sink_bias")
    return any(
        getattr(module, name, None) is not None for module in model.modules() for name in names
    )


def attends_to_images_both_ways(model: Any, model_config: Any) -> bool:
    """Whether a loaded model makes attention masks for its images (Gemma 3), and may get images.

    The engine hands such masks to its triton backend alone, and silently to no other.
    """
    return bool(model_config.is_multimodal) and hasattr(model, "prepare_attn_masks")


def fa4() -> Callable[..., Any]:
    """``flash_attn_varlen_func`` of the engine's own copy of FA4.

    Raises:
        ImportError: it, or what it needs, is not there.
    """
    from sglang.kernels.ops.attention import flash_attention_v4

    if not flash_attention_v4.is_flash_attention_v4_available():
        raise ImportError("FA4 or CuTe DSL cannot be imported")
    return flash_attention_v4.flash_attn_varlen_func


def gpu_capability(device: str) -> tuple[int, int] | None:
    """Compute capability of the current GPU, None if the engine does not run on one."""
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()
