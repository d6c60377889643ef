"""The transforms change what is stored and nothing that attention says."""

from __future__ import annotations

import pytest
import torch

from inkling_backend.errors import InvalidTensorError
from inkling_backend.transforms import (
    KeyTransform,
    PoolCenters,
    center_of,
    rotate,
)


def hadamard(size: int) -> torch.Tensor:
    """Sylvester's matrix, not normalised."""
    one = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(matrix, one)
    return matrix


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small enough that every sum here is exact in float32."""
    return torch.randint(-50, 51, shape).float()


def weights(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Attention weights in float64 of one head, ``[T, D]`` each."""
    return (q.double() @ k.double().T / 8).softmax(-1)


@pytest.mark.parametrize("dim", [16, 64, 256])
def test_rotation_is_the_hadamard_matrix(dim: int) -> None:
    x = whole_numbers(5, 3, dim)
    assert torch.equal(rotate(x), x @ hadamard(dim) * dim**-0.5)
    assert torch.equal(rotate(rotate(x)), x)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
def test_rotation_preserves_products(dim: int) -> None:
    q, k = whole_numbers(7, dim), whole_numbers(9, dim)
    products = rotate(q).double() @ rotate(k).double().T
    torch.testing.assert_close(products, (q @ k.T).double(), rtol=1e-6, atol=1e-3)


def test_other_dims_turn_in_blocks() -> None:
    x = whole_numbers(4, 96)
    for block in range(3):
        part = slice(block * 32, block * 32 + 32)
        assert torch.equal(rotate(x)[:, part], rotate(x[:, part]))


def test_an_outlying_channel_is_spread() -> None:
    x = torch.zeros(1, 128)
    x[0, 17] = 1000.0
    assert rotate(x).abs().max() < 100


@pytest.mark.parametrize("bad", [torch.tensor(1.0), torch.ones(3, 16, dtype=torch.int32)])
def test_rotation_takes_floating_rows(bad: torch.Tensor) -> None:
    with pytest.raises(InvalidTensorError):
        rotate(bad)


@pytest.mark.parametrize("first", [1, 7, 300])
def test_centering_does_not_change_softmax(first: int) -> None:
    offset = torch.randn(64) * 100
    keys = torch.randn(300, 1, 64) + offset
    center = center_of(keys[:first])
    q = torch.randn(20, 64)
    centered = KeyTransform(center).key(keys.double().float())[:, 0]
    torch.testing.assert_close(weights(q, centered), weights(q, keys[:, 0]), rtol=1e-3, atol=1e-6)
    assert centered.abs().max() < 10 < keys.abs().max()


def test_center_is_the_mean_of_each_head() -> None:
    keys = whole_numbers(4, 2, 16)
    assert torch.equal(center_of(keys), keys.mean(0))


def test_a_pools_center_is_fixed_by_its_first_keys() -> None:
    centers, first = PoolCenters(), torch.randn(10, 2, 16)
    center = centers.of(0, first)
    assert torch.equal(center, center_of(first))
    assert centers.of(0, first + 5) is center
    assert torch.equal(centers.of(1, first + 5), center_of(first + 5))
    assert torch.equal(PoolCenters().of(0, first + 5), center_of(first + 5))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_key_stays_out_of_the_center(bad: float) -> None:
    keys = whole_numbers(5, 2, 16)
    keys[1, 0, 3] = bad
    center = center_of(keys)
    assert torch.equal(center[0], keys[[0, 2, 3, 4], 0].mean(0))
    assert torch.equal(center[1], keys[:, 1].mean(0))
    keys[:, 0, 0] = bad
    assert torch.equal(center_of(keys)[0], torch.zeros(16))


def test_keys_of_another_shape() -> None:
    with pytest.raises(InvalidTensorError, match=r"\[T, kv heads, D\]"):
        center_of(torch.ones(3, 16))


def test_both_transforms_keep_attention() -> None:
    keys, q = torch.randn(50, 1, 64) + 30, torch.randn(20, 1, 64)
    transform = KeyTransform(center_of(keys), rotates=True)
    ours = weights(transform.query(q)[:, 0], transform.key(keys)[:, 0])
    torch.testing.assert_close(ours, weights(q[:, 0], keys[:, 0]), rtol=1e-3, atol=1e-6)


def test_what_is_not_a_number_has_one_sign() -> None:
    keys = torch.full((2, 1, 16), -torch.nan)
    keys[1] = torch.inf  # and less infinity
    for transform in (KeyTransform(torch.zeros(1, 16)), KeyTransform(rotates=True)):
        seen = transform.key(keys)
        bad = seen[seen.isnan()]
        assert len(bad) >= 16
        assert not bad.signbit().any()


def test_absurd_keys_are_no_center() -> None:
    keys = torch.ones(4, 1, 16)
    keys[2, 0, 3] = 3e38
    assert torch.equal(center_of(keys), torch.ones(1, 16))


def test_no_transform_is_the_identity() -> None:
    x = torch.randn(3, 2, 16).bfloat16()
    assert torch.equal(KeyTransform().key(x), x.float())
    assert torch.equal(KeyTransform().query(x), x.float())
