"""The ledger: every place where the plugin changes the engine.

Each hook acts for this backend alone and calls the engine's own code for every other. `install`
registers them; `verify` fails loudly where the engine only logs that a hook could not be applied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inkling_backend.engines.sglang import inkling_model, sizing, versions
from inkling_backend.engines.sglang.flags import (
    BACKEND,
    DEFAULT_KV_CACHE_DTYPE,
    KV_CACHE_DTYPES,
    add_cli_args,
    construct,
    flags_of,
    take,
)
from inkling_backend.engines.sglang.requirements import (
    argument_reasons,
    environment_reasons,
    flag_reasons,
    uses_backend,
)
from inkling_backend.engines.sglang.speculation import chain_defaults, not_drafted_reasons
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats.layout import DEFAULT_PAGE_SIZE


@dataclass(frozen=True)
class Patch:
    """One change to the engine.

    Attributes:
        target: dotted name, or the name of an argument resolution step.
        how: ``step``, ``after``, ``around``, ``before`` or ``replace``; ``model`` if the backend
            calls it with the module of the target once a model of its kind is loaded.
        hook: what runs.
        why: what would not work without it.
        since: first engine version that needs it.
        until: when it can go.
    """

    target: str
    how: str
    hook: Callable[..., Any]
    why: str
    since: str = "0.5.17"
    until: str = "the engine lets an attention backend bring its own KV pool"


# Arguments


def _add_flags(result: Any, parser: Any) -> None:
    add_cli_args(parser)


def _from_cli_args(original: Callable[..., Any], cls: type, args: Any) -> Any:
    values = dict(vars(args))
    flags = take(values)
    return construct(flags, lambda: original(cls, type(args)(**values)))


def build_server_args(server_args_class: type, **kwargs: Any) -> Any:
    """``ServerArgs`` from the keywords of ``sglang.Engine``, the backend's own among them."""
    flags = take(kwargs)
    return construct(flags, lambda: server_args_class(**kwargs))


def _prepare(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Default the cache's dtype and page size, then refuse with every reason at once."""
    previous(server_args)
    view, flags = versions.view(server_args), flags_of(server_args)
    backends = versions.attention_backends(view)
    if not uses_backend(backends):
        _raise_if(flag_reasons(flags, backends, view.kv_cache_dtype))
        return
    verify()
    if view.kv_cache_dtype in (None, "auto"):
        versions.set_fields(server_args, kv_cache_dtype=DEFAULT_KV_CACHE_DTYPE)
    if view.page_size is None:
        versions.set_fields(server_args, page_size=DEFAULT_PAGE_SIZE)
    bf16 = KV_CACHE_DTYPES.get(view.kv_cache_dtype) == "bf16"
    if getattr(view, "enable_hierarchical_cache", False) and not bf16:
        # The host pool has one layout and copies by itself, by page numbers on the host.
        host_tier = {"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"}
        versions.set_fields(server_args, **host_tier)
    if chain := chain_defaults(view):
        versions.set_fields(server_args, **chain)
    view = versions.view(server_args)
    model = versions.model_config(server_args)
    if getattr(model, "full_attention_layer_ids", None) == []:
        # The engine has a pool for windows alone, but in pages of one token.
        versions.set_fields(server_args, disable_hybrid_swa_memory=True)
    reasons = argument_reasons(
        view,
        flags,
        backends,
        model,
        capability=versions.gpu_capability(view.device),
        cpu_supported=versions.runs_on_cpu(),
        host_tier_supported=versions.has_host_pools(),
        tp_size=versions.attention_tp_size(view),
        traits=versions.model_traits(model),
    )
    _raise_if([*reasons, *environment_reasons(view.device)])


def _raise_if(reasons: list[str], subject: str = "this configuration") -> None:
    if reasons:
        raise UnsupportedError(subject, reasons)


def _skip(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Skip an engine check that knows only the engine's own backends."""
    if not uses_backend(versions.attention_backends(versions.view(server_args))):
        previous(server_args)


def _pass_as_triton(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let the engine adjust itself to the model as for its triton backend."""
    with versions.shown_as(server_args, BACKEND, "triton"):
        previous(server_args)


def _confirm(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Refuse if the engine's later steps replaced what the user chose and we had accepted."""
    before = versions.attention_backends(versions.view(server_args))
    previous(server_args)
    view = versions.view(server_args)
    after = versions.attention_backends(view)
    if not uses_backend(before):
        return
    if after != before:
        raise UnsupportedError(
            "this model", [f"the engine forces the attention backends {after} instead of {before}"]
        )
    if view.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise UnsupportedError(
            "this model", [f"the engine forces --kv-cache-dtype {view.kv_cache_dtype}"]
        )
    _raise_if(not_drafted_reasons(view), "this model")


# KV pool


def _configure_kv_cache_dtype(original: Callable[..., Any], **kwargs: Any) -> Any:
    import torch

    from inkling_backend.engines.sglang.pool import engine_recipe, pool_dtype_name

    name = kwargs["server_args_kv_cache_dtype"]
    if not uses_backend(versions.active_attention_backends()) or name not in KV_CACHE_DTYPES:
        return original(**kwargs)
    recipe = engine_recipe(name)
    if not recipe.k.block:
        return original(**kwargs)
    return pool_dtype_name(recipe), torch.uint8


def _take_pool_class(configurator: Any, **kwargs: Any) -> Any:
    from inkling_backend.engines.sglang.pool import InklingKVPool, layouts_of, recipe_of

    flags = flags_of(versions.active_server_args())
    recipe = recipe_of(configurator.kv_cache_dtype_str)
    if recipe is None:
        return None
    layout, others = layouts_of(
        recipe, flags, configurator.model_config, configurator.pool_page_size
    )
    kwargs["mha_pool_class"] = functools.partial(
        InklingKVPool,
        layout=layout,
        others=others,
        centers=flags.centers_keys,
        rotates=flags.rotates_keys,
    )
    return (configurator,), kwargs


def _build_kv_host_pool(original: Callable[..., Any], **kwargs: Any) -> Any:
    from inkling_backend.engines.sglang.pool import InklingKVPool

    if not isinstance(kwargs["kv_pool"], InklingKVPool):
        return original(**kwargs)
    from inkling_backend.engines.sglang.host_pool import build

    return build(**kwargs)


def _draft_decode(original: Callable[..., Any], factory: Any) -> Any:
    from inkling_backend.engines.sglang.backend import InklingAttnBackend

    backend = factory.draft_model_runner.attn_backend
    if not isinstance(backend, InklingAttnBackend) or factory.speculative_num_steps <= 1:
        return original(factory)
    from inkling_backend.engines.sglang.draft import DraftSteps

    return DraftSteps(backend, factory.speculative_num_steps)


def _draft_extend(original: Callable[..., Any], factory: Any) -> Any:
    from inkling_backend.engines.sglang.backend import InklingAttnBackend

    backend = factory.draft_model_runner.attn_backend
    return backend if isinstance(backend, InklingAttnBackend) else original(factory)


def _get_last_loc(
    original: Callable[..., Any], req_to_token: Any, req_pool_indices: Any, prefix_lens: Any
) -> Any:
    if req_to_token.device.type != "cpu" or not uses_backend(versions.active_attention_backends()):
        return original(req_to_token, req_pool_indices, prefix_lens)
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


_DRAFTS = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
_SIZERS = "sglang.srt.model_executor.pool_configurator"
_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_ARGS = "sglang.srt.server_args.ServerArgs"
_FOREVER = "never: these are the backend's own options"
_NO_ALLOW_LIST = "the engine's check lets registered backends declare what they read"

PATCHES: tuple[Patch, ...] = (
    Patch(f"{_ARGS}.add_cli_args", "after", _add_flags, "our flags on the command line",
          until=_FOREVER),
    Patch(f"{_ARGS}.from_cli_args", "around", _from_cli_args,
          "our flags are no fields of ServerArgs: the recipe becomes kv_cache_dtype, the rest is "
          "attached to the record", until=_FOREVER),
    Patch("handle_cuda_graph_config", "step", _prepare,
          "defaults (MXFP8, page size 128) and refusals, at the first step after the device and "
          "the model are known", until=_FOREVER),
    Patch("handle_model_specific_adjustments", "step", _pass_as_triton,
          "GPT-OSS and Gemma 4 are allowed with the engine's own backends only",
          until=_NO_ALLOW_LIST),
    Patch("handle_nvfp4_prefill_kv_dequant_dtype", "step", _skip,
          "allows only flashinfer and trtllm_mha to read NVFP4", since="0.5.23",
          until=_NO_ALLOW_LIST),
    Patch("handle_kv4_compatibility", "step", _skip,
          "refuses NVFP4 below SM100, FP4 off CUDA, and backends not on its list",
          until=_NO_ALLOW_LIST),
    Patch("handle_mxfp8_kv_cache_compatibility", "step", _skip, "refuses MXFP8 below SM100",
          until=_NO_ALLOW_LIST),
    Patch("handle_model_capability_adjustments", "step", _confirm,
          "the engine's last step may still force another backend or cache dtype", until=_FOREVER),
    Patch("apply_inkling_prefill_cuda_graph_default", "step", _skip,
          "captures the prefill of Inkling as a whole by default, which FA4 alone can be",
          until="the default asks whether the backend can be captured"),
    Patch("sglang.srt.models.inkling_common.attn.InklingAttention.forward", "model",
          inkling_model.present,
          "asserts that fa4 or triton serves, and would always quantize Q for an MXFP8 cache",
          until="the layers ask the backend what it takes"),
    Patch("sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype", "around",
          _configure_kv_cache_dtype,
          "gives the pool a dtype of its own (uint8, 'inkling_<recipe>'), so that no branch for "
          "the engine's FP4 and MXFP8 pools is taken"),
    Patch(f"{_POOLS}._build_mha_kv_pool", "before", _take_pool_class, "the pool class"),
    Patch(f"{_POOLS}._build_hybrid_swa_kv_pool", "before", _take_pool_class,
          "the class of the two pools of models with layers with a window"),
    Patch(f"{_SIZERS}.DefaultPoolConfigurator._compute_cell_size", "around", sizing.cell_size,
          "bytes per token of the pool, so that its size is right"),
    Patch(f"{_SIZERS}.DefaultPoolConfigurator.__init__", "after", sizing.add_draft,
          "bytes per token of the draft model's pool, which the engine takes for one of as many "
          "heads as the target's"),
    Patch(f"{_SIZERS}.HybridSWAPoolConfigurator.__init__", "after", sizing.size_two_pools,
          "the same for two pools"),
    Patch(f"{_POOLS}._profile_available_bytes", "after", sizing.without_workspace,
          "keeps the runner's workspace, allocated after the pools, out of their share",
          until="the engine asks attention backends for their workspace"),
    Patch(f"{_DRAFTS}.create_decode_backend", "around", _draft_decode,
          "attention of the steps of a draft: the factory knows the engine's own backends only",
          until="the factory asks the registry of backends"),
    Patch(f"{_DRAFTS}.create_draft_extend_backend", "around", _draft_extend,
          "attention of a draft model to what was verified: the same",
          until="the factory asks the registry of backends"),
    Patch("sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler.build_kv_host_pool", "around",
          _build_kv_host_pool,
          "the host tier's pool: the engine's own would leave the scales behind", since="0.5.23"),
    Patch("sglang.srt.mem_cache.allocation.get_last_loc", "around", _get_last_loc,
          "runs a Triton kernel on CPU tensors for every backend but torch_native",
          until="the engine asks the device instead of the backend's name"),
)  # fmt: skip

# Not a hook: the class attribute `sglang.srt.entrypoints.engine.Engine.server_args_class`, set by
# plugin.py, because plugins load inside `Engine.__init__` and hooks on it would come too late.

_registered: list[str] = []
# Backends of our name that were there before ours.
_displaced: list[Callable[[Any], Any]] = []


def wanted(new: bool) -> list[Patch]:
    """The patches that an engine needs; ``new``: one with `versions.has_resolution_pipeline`."""
    return [patch for patch in PATCHES if patch.since == "0.5.17" or new]


def install() -> None:
    """Register every hook; the engine applies them once all plugins are loaded."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for patch in wanted(versions.has_resolution_pipeline()):
        if patch.how == "model":
            continue
        if patch.how == "step":
            target = versions.hook_resolution_step(patch.target, patch.hook)
        else:
            target = patch.target
            HookRegistry.register(target, patch.hook, HookType(patch.how))
        if target is not None:
            _registered.append(target)


def verify() -> None:
    """Raise if the engine could not apply a hook (it only logs that), or does not run ours.

    Raises:
        UnsupportedError: names the hooks that are missing, the plugin that took a place of ours, or
            an engine version that nobody tried.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    version = versions.engine_version()
    missing = sorted(set(_registered) - HookRegistry._patched)
    reasons = []
    if missing or not _registered:
        reasons.append(not_installed(", ".join(missing) or "register() of the plugin did not run"))
    untried = versions.version_reason(version)
    _raise_if([*reasons, *filter(None, [untried]), *_rivals()], f"SGLang {version}")


def not_installed(what: str) -> str:
    """The reason against an engine in which a place for the plugin is missing."""
    return f"the plugin could not be installed ({what}): this engine version is not supported"


def _rivals() -> list[str]:
    """Other plugins that replace what the ledger changes, or the backend itself."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    remedy = "leave one of the two out of SGLANG_PLUGINS"
    found = []
    for target, hooks in HookRegistry._hooks.items():
        if not any(own == target or own.startswith(f"{target}.") for own in _registered):
            continue
        for kind, hook, source in hooks:
            if kind is HookType.REPLACE:
                name = getattr(source, "plugin_name", None) or hook.__module__
                found.append(
                    f"the plugin {name} replaces {target}, which this one changes: {remedy}"
                )
    creators = [*_displaced, ATTENTION_BACKENDS.get(BACKEND)]
    modules = [creator.__module__ for creator in creators if creator is not None]
    return found + [
        f"{module} registers a backend {BACKEND}, too: {remedy}"
        for module in modules
        if not module.startswith("inkling_backend.")
    ]


def claim(create: Callable[[Any], Any]) -> None:
    """Register ``create`` as the backend; `verify` refuses if another plugin has the name, too."""
    from sglang.srt.layers.attention.attention_registry import (
        ATTENTION_BACKENDS,
        register_attention_backend,
    )

    if BACKEND in ATTENTION_BACKENDS:
        _displaced.append(ATTENTION_BACKENDS[BACKEND])
    register_attention_backend(BACKEND)(create)
