"""Arguments that the attention kernels share: the query, the cache and what describes them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from inkling_backend.formats import FORMATS, Query, get_format
from inkling_backend.formats.layer_attention import LayerAttention
from inkling_backend.formats.layout import CacheLayout, LayerCache
from inkling_backend.kernels.compile_case import CompileCase
from inkling_backend.kernels.configs import KernelConfig
from inkling_backend.kernels.side import Side


def cache_arguments(query: Query, cache: LayerCache) -> tuple[torch.Tensor | int | None, ...]:
    """The first arguments of an attention kernel; what a format or layout has not is None."""
    return (
        query.data,
        query.scale,
        query.row_stride,
        cache.k_data,
        cache.k_scale,
        cache.v_data,
        cache.v_scale,
        cache.k_global,
        cache.v_global,
        cache.k_first,
        cache.v_first,
    )


def layer_arguments(layer: LayerAttention) -> tuple[Any, ...]:
    """What an attention kernel takes of a layer: sm_scale_log2, window, softcap_log2, sinks_ptr.

    Both factors are for exponents of two. A feature that the layer has not is None: a constant, so
    that nothing of it is compiled.
    """
    softcap = None if layer.softcap is None else layer.softcap * math.log2(math.e)
    return layer.sm_scale * math.log2(math.e), layer.window, softcap, layer.sinks


def bias_arguments(layer: LayerAttention) -> tuple[Any, ...]:
    """bias_ptr, bias_row_stride, bias_head_stride, bias_extent; None, all of them, without one."""
    if layer.bias is None:
        return None, None, None, None
    return layer.bias, layer.bias.stride(0), layer.bias.stride(1), layer.bias.shape[2]


def cache_constants(layout: CacheLayout, group: int, max_pages: int) -> dict[str, Any]:
    """The constexpr arguments of an attention kernel that describe the cache.

    Args:
        group: query heads of one KV head.
        max_pages: columns of the page table.
    """
    return {
        "K": Side.of(layout, layout.k),
        "V": Side.of(layout, layout.v),
        "GROUP": group,
        "MAX_PAGES": max_pages,
    }


class Example(NamedTuple):
    """A model for which kernels are compiled in the tests.

    dtype: Triton's name of the model's dtype.
    quantized: whether its query is MXFP8.
    features: names of the arguments of `layer_arguments` that are not None.
    q_len: query tokens of a request in decode.
    tree: whether they are a tree.
    biased: whether logits have a relative bias.
    """

    name: str
    layout: CacheLayout
    group: int
    dtype: str
    quantized: bool
    features: tuple[str, ...] = ()
    q_len: int = 1
    tree: bool = False
    biased: bool = False

    @property
    def rows(self) -> int:
        """Query rows that meet one KV head in decode."""
        return self.group * self.q_len

    def layer_signature(self) -> dict[str, str]:
        """Types of `layer_arguments`."""
        types = {"window": "i32", "softcap_log2": "fp32", "sinks_ptr": f"*{self.dtype}"}
        absent = dict.fromkeys(set(types) - set(self.features), "constexpr")
        return {"sm_scale_log2": "fp32", **types, **absent}

    def bias_signature(self) -> dict[str, str]:
        """Types of `bias_arguments`."""
        integers = ("bias_row_stride", "bias_head_stride", "bias_extent")
        types = {"bias_ptr": f"*{self.dtype}", **dict.fromkeys(integers, "i32:16")}
        return types if self.biased else dict.fromkeys(types, "constexpr")

    def signature(self) -> dict[str, str]:
        """Types of `cache_arguments`."""
        types = {"q_ptr": f"*{self.dtype}", "q_scale_ptr": "constexpr"}
        if self.quantized:
            types = {"q_ptr": "*u8", "q_scale_ptr": "*u8"}
        types["q_stride"] = "i32:16"
        sides = (("k", self.layout.k_format), ("v", self.layout.v_format))
        for side, fmt in sides:
            types[f"{side}_ptr"] = "*u8" if fmt.block else "*bf16"
            types[f"{side}_scale_ptr"] = "*u8" if fmt.block else "constexpr"
        for side, fmt in sides:
            types[f"{side}_global_ptr"] = "*fp32" if fmt.has_global_scale else "constexpr"
        first = "*bf16" if self.layout.sink_tokens else "constexpr"
        return types | {"k_first_ptr": first, "v_first_ptr": first}


def examples() -> Iterator[Example]:
    """Every format and a mixed pair, every head size and group; a float16 model; small pages;
    layers with features. KVFP4, whose codes are MXFP4's, has two head sizes."""
    pairs = [(name, name) for name in FORMATS]
    cases = list(itertools.product([*pairs, ("mxfp8", "nvfp4")], ((128, 4), (256, 7))))
    cases += list(itertools.product([p for p in pairs if p[0] != "kvfp4"], ((64, 1), (96, 4))))
    for (k, v), (head_dim, group) in cases:
        layout = CacheLayout(get_format(k), get_format(v), 8, head_dim, head_dim)
        yield Example(f"{k}-{v}-d{head_dim}", layout, group, "bf16", quantized=k == v == "mxfp8")
    mxfp8, bf16 = get_format("mxfp8"), get_format("bf16")
    half = CacheLayout(bf16, bf16, 8, 128, 128)
    yield Example("float16", half, 16, "fp16", quantized=False)
    uneven = CacheLayout(mxfp8, mxfp8, 1, 192, 128, page_size=32)
    yield Example("page32-dk192-dv128", uneven, 64, "bf16", quantized=False)
    for name, head_dim, group, features in (
        ("mxfp8", 64, 8, ("window", "sinks_ptr")),  # GPT-OSS
        ("nvfp4", 128, 4, ("window", "softcap_log2", "sinks_ptr")),
        ("bf16", 256, 2, ("window", "softcap_log2")),  # Gemma 2
    ):
        fmt = get_format(name)
        layout = CacheLayout(fmt, fmt, 8, head_dim, head_dim)
        yield Example(f"features-{name}", layout, group, "bf16", name == "mxfp8", features)
    for name, q_len in (("mxfp8", 4), ("nvfp4", 8)):
        fmt = get_format(name)
        layout = CacheLayout(fmt, fmt, 8, 128, 128)
        window = ("window",) if name == "mxfp8" else ()
        yield Example(f"verify-{name}", layout, 4, "bf16", name == "mxfp8", window, q_len)
        yield Example(f"tree-{name}", layout, 4, "bf16", name == "mxfp8", (), q_len, tree=True)
    for k, v, head_dim, group, q_len in (
        ("nvfp4", "nvfp4", 128, 4, 1),
        ("mxfp8", "nvfp4", 128, 4, 1),
        ("kvfp4", "kvfp4", 256, 7, 1),
        ("mxfp8", "mxfp8", 64, 8, 1),
        ("nvfp4", "nvfp4", 128, 4, 4),
    ):
        layout = CacheLayout(get_format(k), get_format(v), 8, head_dim, head_dim, sink_tokens=4)
        asked = ("window", "sinks_ptr") if head_dim == 64 else ()
        name = f"first-{k}-{v}-d{head_dim}-q{q_len}"
        yield Example(name, layout, group, "bf16", False, asked, q_len)
    encoder = CacheLayout(mxfp8, mxfp8, 8, 96, 96)
    yield Example("features-encoder", encoder, 1, "fp16", True, ("softcap_log2",))


def biased_examples() -> Iterator[Example]:
    """Layers of Inkling, for the kernels that take a bias."""
    for name, q_len, features in (
        ("mxfp8", 1, ("window",)),
        ("nvfp4", 1, ()),
        ("bf16", 1, ("window",)),
        ("mxfp8", 4, ()),
    ):
        fmt = get_format(name)
        layout = CacheLayout(fmt, fmt, 8, 128, 128)
        case = f"bias-{name}" + (f"-verify{q_len}" if q_len > 1 else "")
        quantized = name == "mxfp8"
        yield Example(case, layout, 4, "bf16", quantized, features, q_len, biased=True)


def compile_case(
    kernel: Any,
    example: Example,
    signature: dict[str, str],
    constants: dict[str, Any],
    config: KernelConfig,
) -> CompileCase:
    """The case of one attention kernel for one example.

    Args:
        signature: types of the run-time arguments behind `cache_arguments`.
        constants: constexprs but for QUANTIZED.
    """
    signature = {**example.signature(), **example.layer_signature(), **signature}
    absent = {name: None for name, kind in signature.items() if kind == "constexpr"}
    kind = kernel.fn.__name__.strip("_").removesuffix("_kernel")
    return CompileCase(
        name=f"{kind}-{example.name}",
        kernel=kernel,
        signature=signature,
        constexprs={**constants, **absent, "QUANTIZED": example.quantized},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
