"""What is measured: operations, shapes, models and recipes."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from inkling_backend.errors import InklingError, UnknownNameError
from inkling_backend.formats import RECIPES, Recipe, get_format, get_recipe
from inkling_backend.formats.layout import DEFAULT_PAGE_SIZE, SINKS, CacheLayout, parse_sinks

RECIPE_NAMES = tuple(RECIPES)

DECODE, VERIFY, EXTEND, STORE, ENGINE = "decode", "verify", "extend", "store", "engine_decode"
SHAPES: dict[str, tuple[str, ...]] = {
    DECODE: (
        *("64x8k", "16x32k", "16x8k", "1x128k", "256x1k"),
        *("64x1k", "1x1k", "1x8k", "8x2k"),
    ),
    VERIFY: ("64x8k", "16x8k", "1x8k"),
    EXTEND: ("1x8k", "1x32k", "1x2k+32k"),
    STORE: ("1", "64", "256", "8k", "32k"),
    ENGINE: ("64x8k", "1x1k"),
}
QUICK_SHAPES: dict[str, tuple[str, ...]] = {
    DECODE: ("16x8k", "64x1k", "1x8k"),
    VERIFY: ("16x8k",),
    EXTEND: ("1x8k",),
    STORE: ("1", "256", "8k"),
    ENGINE: ("1x1k",),
}
QUICK_RECIPES = ("mxfp8", "nvfp4", "bf16")

# The longest of a ragged batch's lengths over its shortest.
SPREAD = 100

_SHAPE = re.compile(r"(?:(\d+k?)x)?(\d+k?)(?:\+(\d+k?))?", re.IGNORECASE)


class CaseError(InklingError, ValueError):
    """A recipe, a shape or a number on the command line cannot be measured."""


# After a plus sign behind a recipe's name: what is done to its keys before they are stored, and
# NVFP4 blocks scaled to 4 or 6, whichever errs less. Beside them `SINKS`.
TRANSFORMS = ("center", "rotate", "fouroversix")


def parse_recipe(name: str) -> tuple[Recipe, frozenset[str]]:
    """The recipe ``NAME[+TRANSFORM...]``, which keeps that name, and its transforms.

    Raises:
        UnknownNameError: a part of the name is not known.
        CaseError: four-over-six without NVFP4, sink tokens without block scales.
    """
    base, *transforms = name.split("+")
    for transform in transforms:
        if transform not in TRANSFORMS and not parse_sinks(transform):
            raise UnknownNameError("transform", transform, (*TRANSFORMS, SINKS))
    recipe = get_recipe(base)
    if "fouroversix" in transforms:
        if not recipe.has_nvfp4:
            raise CaseError(f"recipe {name!r}: +fouroversix is a rule of NVFP4 blocks")
        recipe = recipe.with_four_over_six()
    if any(map(parse_sinks, transforms)) and not recipe.is_quantized:
        raise CaseError(f"recipe {name!r}: +{SINKS} goes with a base that has block scales")
    return replace(recipe, name=name), frozenset(transforms)


@dataclass(frozen=True)
class Shape:
    """``BATCHxTOKENS`` or ``BATCHxTOKENS+PREFIX`` as the user gave it.

    Attributes:
        batch: requests.
        tokens: tokens of each; for extend and store the new ones.
        prefix: cached tokens before the new ones, extend alone.
    """

    batch: int
    tokens: int
    prefix: int


def parse_shape(text: str) -> Shape:
    """``64x8k``, ``8k`` (one request) or ``1x2k+32k``; a ``k`` is 1024.

    Raises:
        CaseError: the text is no such shape, or a number in it is 0.
    """
    found = _SHAPE.fullmatch(text.strip())
    if found is None:
        raise CaseError(f"shape {text!r}: expected BATCHxTOKENS like 64x8k, or 1x2k+32k")
    batch, tokens, prefix = (_number(part) for part in found.groups())
    shape = Shape(1 if batch is None else batch, tokens or 0, prefix or 0)
    if not shape.batch or not shape.tokens:
        raise CaseError(f"shape {text!r}: expected at least one request and one token")
    return shape


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    return int(text[:-1]) * 1024 if text[-1] in "kK" else int(text)


@dataclass(frozen=True)
class Heads:
    """Attention of the model that is measured; one head_dim for K and V."""

    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = DEFAULT_PAGE_SIZE

    def layout(self, recipe: Recipe) -> CacheLayout:
        """Pages of this model in a recipe."""
        dim = self.head_dim
        sinks = max(map(parse_sinks, recipe.name.split("+")))
        return CacheLayout(recipe.k, recipe.v, self.kv_heads, dim, dim, self.page_size, sinks)


@dataclass(frozen=True)
class Case:
    """One operation at one shape.

    Attributes:
        op: one of the operations above.
        batch: requests.
        context: tokens of a request, new ones included; of a ragged batch the mean.
        new_tokens: query tokens of a request.
        ragged: whether the lengths differ, at the same total.
        store: whether a decode stores K and V of the new tokens first, in the time measured.
    """

    op: str
    batch: int
    context: int
    new_tokens: int
    heads: Heads
    ragged: bool = False
    store: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every request."""
        if not self.ragged:
            return (self.context,) * self.batch
        return ragged_lengths(self.batch, self.context, self.new_tokens)

    @property
    def rotates(self) -> bool:
        """Whether the time depends on the cache being cold: not where every byte is read often."""
        return self.op != EXTEND

    @property
    def name(self) -> str:
        """The case in few words, for people."""
        extra = f" {self.new_tokens} new" if self.op in (VERIFY, EXTEND, STORE) else ""
        flags = (" ragged" if self.ragged else "") + (" + store" if self.store else "")
        return f"{self.op} {self.batch}x{short(self.context)}{extra}{flags}"

    def facts(self) -> dict[str, object]:
        """What identifies the case in a row of results."""
        heads = self.heads
        facts: dict[str, object] = {
            "op": self.op,
            "batch": self.batch,
            "context": self.context,
            "q_heads": heads.q_heads,
            "kv_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "page_size": heads.page_size,
        }
        if self.op in (VERIFY, EXTEND, STORE):
            facts["new_tokens"] = self.new_tokens
        return facts | {name: True for name in ("ragged", "store") if getattr(self, name)}

    def bytes(self, recipe: Recipe) -> int:
        """Bytes that the operation must move, each once."""
        heads, rows = self.heads, self.batch * self.new_tokens
        # Of sink tokens a few rows a request are read: nothing beside the others.
        layout = replace(heads.layout(recipe), sink_tokens=0)
        plain_q = rows * heads.q_heads * heads.head_dim * 2
        query = plain_q
        if recipe.quantize_query:
            query = rows * heads.q_heads * get_format("mxfp8").row_bytes(heads.head_dim)
        # Rows of K and V as the model gives them, and their slots.
        inputs = rows * (layout.bytes_per_token_bf16 + 8)
        rewrites = recipe.quantize_query or "rotate" in parse_recipe(recipe.name)[1]
        if rewrites:
            inputs += plain_q
        if self.op == STORE:
            written = query if rewrites else 0
            return inputs + rows * layout.bytes_per_token + written
        attention = sum(self.lengths) * layout.bytes_per_token + query + plain_q
        return attention + (inputs if self.store else 0)


def make_case(
    op: str,
    text: str,
    heads: Heads,
    *,
    query_tokens: int = 1,
    ragged: bool = False,
    store: bool = False,
) -> Case:
    """The case of an operation at the shape ``text``.

    Raises:
        CaseError: the shape is none, or has a prefix where there can be none.
    """
    shape = parse_shape(text)
    if shape.prefix and op != EXTEND:
        raise CaseError(f"shape {text!r}: only extend takes a cached prefix")
    if op in (EXTEND, STORE):
        return Case(op, shape.batch, shape.tokens + shape.prefix, shape.tokens, heads)
    if shape.tokens < query_tokens:
        raise CaseError(f"shape {text!r}: expected at least {query_tokens} tokens a request")
    return Case(op, shape.batch, shape.tokens, query_tokens, heads, ragged, store)


def ragged_lengths(batch: int, mean: int, least: int) -> tuple[int, ...]:
    """``batch`` lengths of at least ``least`` in a geometric spread of 1:100, total batch * mean.

    Short and long ones alternate, so that neighbours differ.
    """
    if batch == 1:
        return (mean,)
    weights = [SPREAD ** (i / (batch - 1)) for i in range(batch)]
    scale = batch * mean / sum(weights)
    lengths = [max(least, round(weight * scale)) for weight in weights]
    lengths[-1] += batch * mean - sum(lengths)
    order = [i // 2 if i % 2 == 0 else batch - 1 - i // 2 for i in range(batch)]
    return tuple(lengths[i] for i in order)


def short(tokens: int) -> str:
    """A number of tokens as in a shape: 8192 is ``8k``."""
    return f"{tokens // 1024}k" if tokens and tokens % 1024 == 0 else str(tokens)
