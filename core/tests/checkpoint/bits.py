"""Tensors as bits: random ones of any dtype, and comparing them without arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch


def random_bits(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Make a tensor of any bits its dtype can have, NaNs of all kinds among them."""
    item = torch.empty(0, dtype=dtype).element_size()
    volume = torch.Size(shape).numel()
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (volume * item,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).reshape(tuple(shape))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Give a tensor's bytes in row order."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are of one dtype and shape, and bit for bit the same."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits_of(one), bits_of(other))


def assert_same_bits(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare tensors by name."""
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert same_bits(found[key], tensor), key
