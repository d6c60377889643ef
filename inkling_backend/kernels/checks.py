"""Validation of the tensors that callers hand to kernel wrappers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from triton import knobs

from inkling_backend.errors import InvalidTensorError

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_tensor(
    name: str,
    tensor: object,
    *,
    shape: Sequence[int | None] | None = None,
    dtype: torch.dtype | Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    contiguous: bool = False,
    rows_contiguous: bool = False,
) -> torch.Tensor:
    """Check one tensor argument and return it.

    Args:
        name: what the caller calls it.
        shape: expected sizes; None in a place allows any size there.
        dtype: the expected dtype, or the allowed ones.
        device: the expected device.
        contiguous: whether the whole tensor must be contiguous.
        rows_contiguous: whether the last dimension must have stride 1; the others are free.

    Raises:
        InvalidTensorError: naming the tensor, what was expected and what came.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidTensorError(name, "type", "torch.Tensor", type(tensor).__name__)
    if shape is not None:
        got = tuple(tensor.shape)
        same = len(got) == len(shape) and all(
            want is None or want == have for want, have in zip(shape, got, strict=True)
        )
        if not same:
            want = "(" + ", ".join("any" if n is None else str(n) for n in shape) + ")"
            raise InvalidTensorError(name, "shape", want, got)
    if dtype is not None:
        allowed = (dtype,) if isinstance(dtype, torch.dtype) else tuple(dtype)
        if tensor.dtype not in allowed:
            raise InvalidTensorError(
                name, "dtype", " or ".join(str(d) for d in allowed), tensor.dtype
            )
    if device is not None and tensor.device != device:
        raise InvalidTensorError(name, "device", device, tensor.device)
    if contiguous and not tensor.is_contiguous():
        raise InvalidTensorError(name, "layout", "contiguous", f"strides {tensor.stride()}")
    if rows_contiguous and tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise InvalidTensorError(name, "last stride", 1, f"strides {tensor.stride()}")
    return tensor


def check_runs_kernels(name: str, tensor: torch.Tensor) -> None:
    """Raise unless Triton can run on this tensor's device."""
    if tensor.device.type != "cuda" and not knobs.runtime.interpret:
        raise InvalidTensorError(
            name, "device", "cuda (or cpu with TRITON_INTERPRET=1)", tensor.device
        )
