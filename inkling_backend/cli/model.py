"""What the cache of a model depends on, read from its config.json alone.

transformers completes the file by what its class of model defaults to, as the engine does, and
counts the parameters of the model on the meta device: no weights are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inkling_backend.errors import InklingError

# What transformers calls a layer: with a KV cache of the whole context, with one of a window, with
# none of either.
_FULL = {"full_attention", "attention", "hybrid"}
_WINDOW = {"sliding_attention", "chunked_attention"}
_WITHOUT = {"linear_attention", "mamba", "conv", "recurrent", "mlp", "moe"}
_STATE = _WITHOUT - {"mlp", "moe"} | {"hybrid"}


# Models whose layers with a window get a pool of their own from SGLang 0.5.23
# (``configs/model_config.py::is_hybrid_swa_model``), of those that this backend serves.
WINDOW_POOL_MODELS = frozenset(
    (
        "GptOssForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "GraniteSWAForCausalLM",
        "IQuestQ1ForCausalLM",
        "LagunaForCausalLM",
        "MellumForCausalLM",
        "MuseGlimmerForCausalLM",
        "MuseGlimmerForConditionalGeneration",
    )
)


class PlanError(InklingError, ValueError):
    """The model's configuration or the memory asked for cannot be planned with."""


@dataclass(frozen=True)
class ModelShape:
    """What the cache of a model depends on.

    Attributes:
        full_layers, window_layers: layers with a KV cache: those that see the whole context, and
            those that see ``window`` tokens of it. Layers without a KV cache are in neither.
        window_pool: whether the engine has a pool of their own for layers with a window.
        max_context: tokens of the longest request.
        refusals: why a server would refuse this model although its cache can be planned.
        config: transformers' configuration of the whole model.
    """

    name: str
    full_layers: int
    window_layers: int
    window: int
    window_pool: bool
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    max_context: int
    refusals: tuple[str, ...]
    config: Any

    @property
    def layers(self) -> int:
        """Layers with a KV cache."""
        return self.full_layers + self.window_layers


def read_model(path: Path) -> ModelShape:
    """The shape of the model whose ``config.json`` is, or lies in, ``path``.

    Raises:
        PlanError: there is none, it cannot be read, or its attention is not of the ordinary kind.
        ModuleNotFoundError: transformers is not installed.
    """
    file = path if path.suffix == ".json" else path / "config.json"
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"{file}: expected a model's config.json, got {error}") from None
    if not isinstance(raw, dict):
        raise PlanError(f"{file}: expected a model's config.json, got a {type(raw).__name__}")
    whole = _config(raw, file)
    text = whole.get_text_config(decoder=True)
    if getattr(whole, "is_encoder_decoder", False):
        raise PlanError(f"{file}: encoder-decoder models are not served by this backend")
    if getattr(text, "kv_lora_rank", None):
        raise PlanError(
            f"{file}: MLA models (DeepSeek) keep one latent row a token instead of K and V: not "
            "served by this backend, use another"
        )
    layers, heads = (
        _number(text, name, file) for name in ("num_hidden_layers", "num_attention_heads")
    )
    head_dim = getattr(text, "head_dim", None) or _number(text, "hidden_size", file) // heads
    for name in ("global_head_dim", "swa_head_dim"):
        if getattr(text, name, None) not in (None, head_dim):
            raise PlanError(
                f"{file}: layers with heads of their own size ({name} {getattr(text, name)}, "
                f"head_dim {head_dim}) are not served by this backend"
            )
    kinds, window = _kinds(text, layers), _window(text)
    unknown = set(kinds) - _FULL - _WINDOW - _WITHOUT
    if unknown:
        raise PlanError(f"{file}: unknown kind of layer: {', '.join(sorted(unknown))}")
    refusals = []
    if count := sum(kind in _STATE for kind in kinds):
        refusals.append(
            f"{count} of {layers} layers keep a recurrent state, which is not counted here; hybrid "
            "linear-attention models are not served by this backend yet"
        )
    if "chunked_attention" in kinds:
        refusals.append("chunked local attention is not served by this backend")
    full_layers = sum(kind in _FULL for kind in kinds)
    window_layers = sum(kind in _WINDOW for kind in kinds)
    listed = WINDOW_POOL_MODELS.intersection(raw.get("architectures") or ())
    return ModelShape(
        name=raw.get("_name_or_path") or file.resolve().parent.name,
        full_layers=full_layers,
        window_layers=window_layers,
        window=window or 0,
        window_pool=bool(listed and full_layers and window_layers),
        num_q_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        v_head_dim=getattr(text, "v_head_dim", None) or head_dim,
        max_context=getattr(text, "max_position_embeddings", None) or 8192,
        refusals=tuple(refusals),
        config=whole,
    )


def _config(raw: dict[str, Any], file: Path) -> Any:
    """transformers' configuration; a plain one of the file's own keys for a type it has not."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    known = raw.get("model_type") in CONFIG_MAPPING
    kind = CONFIG_MAPPING[raw["model_type"]] if known else PreTrainedConfig
    try:
        return kind.from_dict(raw)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise PlanError(f"{file}: transformers refuses it: {reason}") from None


def _number(config: Any, name: str, file: Path) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise PlanError(f"{file}: expected the key {name} of a decoder model, got {value}")
    return value


def _window(text: Any) -> int | None:
    if getattr(text, "use_sliding_window", True) is False:
        return None
    return getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)


def _kinds(text: Any, layers: int) -> list[str]:
    """Kind of every layer; without a list of them, all have the window or none has."""
    named = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return list(named or ["sliding_attention" if _window(text) else "full_attention"] * layers)


def count_weights(shape: ModelShape) -> int:
    """Bytes of the model's parameters in 16 bits.

    Raises:
        PlanError: they are kept in another format, or transformers does not know the model.
    """
    quantization = getattr(shape.config, "quantization_config", None)
    if quantization:
        method = dict(quantization).get("quant_method", "some format")
        raise PlanError(
            f"the weights are quantized ({method}): give --weights-gib, the size of their files"
        )
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape.config)
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise PlanError(
            f"transformers cannot count the weights ({reason}): give --weights-gib, the size of "
            "their files"
        ) from None
    return 2 * sum(parameter.numel() for parameter in model.parameters())
