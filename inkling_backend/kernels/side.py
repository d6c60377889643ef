"""What a kernel must know about K or about V of a cache, as one compile-time constant."""

from __future__ import annotations

from typing import NamedTuple

import triton

from inkling_backend.formats.layout import CacheLayout, SideLayout


class Side(NamedTuple):
    """Geometry of one side of a cache; a ``tl.constexpr`` argument.

    Its fields are numbers and strings for Triton; where it wants a constant (the shape of a tensor,
    a string for a callee) they need a ``tl.constexpr`` name.

    fmt:      ``Format.name``; only the store cares.
    codes:    ``Format.codes``.
    dim:      head_dim, elements of a row.
    pad:      the next power of two of dim, at least 16: the width of tiles.
    block:    elements that share one scale byte, 0 if there are no scales.
    heads:    KV heads.
    page:     tokens of a page.
    s_lo, s_hi, s_blk: `SideLayout.scale_strides`.
    four_over_six: `Format.four_over_six`; only the store cares.
    first: `CacheLayout.sink_tokens`.
    """

    fmt: str
    codes: str
    dim: int
    pad: int
    block: int
    heads: int
    page: int
    s_lo: int
    s_hi: int
    s_blk: int
    four_over_six: bool = False
    first: int = 0

    @classmethod
    def of(cls, layout: CacheLayout, side: SideLayout) -> Side:
        """The constant for ``layout.k`` or ``layout.v``."""
        pad = max(16, triton.next_power_of_2(side.head_dim))
        number_format = side.format
        return cls(
            number_format.name,
            number_format.codes,
            side.head_dim,
            pad,
            number_format.block,
            layout.num_kv_heads,
            layout.page_size,
            *side.scale_strides,
            number_format.four_over_six,
            layout.sink_tokens,
        )
