"""The quickened interpreter replaces during a launch what Triton's own does, and puts it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

if torch.cuda.is_available():
    pytest.skip("kernels are compiled here", allow_module_level=True)

PLACES = (tl, core, tl.math, tl.tensor, tl.dtype, core.tensor_descriptor_base)


@triton.jit
def _largest(x):
    return tl.max(x, axis=0)


@triton.jit
def _kernel(x_ptr, out_ptr, FAILS: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 8))
    tl.store(out_ptr, _largest(x))
    tl.static_assert(not FAILS)


def members() -> list[dict[str, Any]]:
    return [dict(vars(place)) for place in PLACES]


def test_calls_of_other_functions_work_in_every_launch() -> None:
    x, out = torch.randn(8), torch.zeros(1)
    for _ in range(2):
        _kernel[(1,)](x, out.zero_(), FAILS=False)
        assert out.item() == x.max()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays_replaced(fails: bool) -> None:
    x, out = torch.randn(8), torch.zeros(1)
    _kernel[(1,)](x, out, FAILS=False)  # restoring makes what is inherited a class's own
    before = members()
    if fails:
        with pytest.raises(Exception, match="AssertionError"):
            _kernel[(1,)](x, out, FAILS=True)
    else:
        _kernel[(1,)](x, out, FAILS=False)
    assert members() == before
    assert before[0]["load"] is core.load
