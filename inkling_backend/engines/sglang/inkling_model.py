"""The Inkling model: what its layers hand to attention, and what they must be told to do so.

Every layer brings a relative bias. The long-context scale (``log_scaling_tau``) is in Q and in the
bias already when they come. Source: the engine's ``models/inkling_common/attn.py``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from inkling_backend.engines.sglang import versions
from inkling_backend.engines.sglang.flags import Flags
from inkling_backend.errors import UnsupportedError
from inkling_backend.formats import Query


def present(layer_module: Any, flags: Flags) -> None:
    """Let the layers of a loaded Inkling model call this backend as they call triton's.

    They assert that the backend is ``fa4`` or ``triton``, and with ``--kv-cache-dtype mxfp8``
    quantize Q by themselves. That is taken where queries are to be in MXFP8; where they are not, or
    K and Q are rotated before, the layers find another dtype, and Q comes as it is.

    Args:
        layer_module: the engine's ``sglang.srt.models.inkling_common.attn``.
    """
    hands_over = flags.quantizes_query and not flags.rotates_keys and versions.stores_inkling_kv()
    shown = {} if hands_over else {"kv_cache_dtype": "auto"}
    versions.show_inkling_layers(layer_module, "triton", shown)


def take_bias(kwargs: MutableMapping[str, Any]) -> torch.Tensor | None:
    """Takes the relative bias ``[T, query heads, extent]`` of a call out of its keywords.

    It comes as ``rel_bias``, with an event that says when it is there, or as the one of
    ``aux_tensors`` that a ``score_mod`` adds.

    Raises:
        UnsupportedError: a ``score_mod`` that does something else.
    """
    bias, event = kwargs.pop("rel_bias", None), kwargs.pop("rel_bias_event", None)
    if event is not None:
        event.wait()
    score_mod, tensors = kwargs.pop("score_mod", None), kwargs.pop("aux_tensors", None)
    if score_mod is None and tensors is None:
        return bias
    known = score_mod is versions.relative_bias_score_mod()
    if not known or bias is not None or tensors is None or len(tensors) != 1:
        name = getattr(score_mod, "__name__", score_mod)
        raise UnsupportedError(
            "this model", [f"its attention layers pass a score_mod ({name}): not supported"]
        )
    return tensors[0]


def take_query(
    q: torch.Tensor, heads: int, head_dim: int, kwargs: MutableMapping[str, Any]
) -> Query | None:
    """Q that the layers have quantized, ``q_descale`` taken out of the keywords; None if they have
    not.

    Args:
        q: ``[T, heads * head_dim]``; float8_e4m3fn where there are scales
            ``[T, heads, head_dim / 32]`` float8_e8m0fnu.
    """
    scale = kwargs.pop("q_descale", None)
    if scale is None:
        return None
    codes = q.contiguous().view(torch.uint8).view(-1, heads, head_dim)
    return Query(codes, scale.contiguous().view(torch.uint8).view(-1, heads, head_dim // 32))
