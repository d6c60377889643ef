"""Rotation of rows by a Hadamard matrix: outlying channels spread over all."""

from __future__ import annotations

import torch

from inkling_backend.errors import InvalidTensorError


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Multiply rows ``[..., D]`` by the orthonormal Hadamard matrix; float32 of x's shape.

    Where D is no power of two, blocks of the largest power of two that divides D turn apart. The
    matrix is its own inverse, and ``rotate(q) @ rotate(k) == q @ k``.

    Raises:
        InvalidTensorError: x is no floating point tensor with a last dimension.
    """
    if x.ndim == 0 or not x.shape[-1] or not x.dtype.is_floating_point:
        raise InvalidTensorError("x", "floating point rows", "[..., D]", f"{x.dtype} {x.shape}")
    dim = x.shape[-1]
    size = dim & -dim
    y = x.float().unflatten(-1, (dim // size, size))
    half = 1
    while half < size:
        a, b = y.unflatten(-1, (-1, 2, half)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return y.flatten(-2) * size**-0.5
