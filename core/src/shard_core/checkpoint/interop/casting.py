"""Casting tensors to another dtype: whether numbers overflow or change, checked a piece at a time."""

from __future__ import annotations

import math

import torch

from shard_core.checkpoint.inspection.compare_elements import pieces_of


def has_less_range(dtype: torch.dtype, than: torch.dtype) -> bool:
    """Return whether a floating-point dtype lacks large numbers that another has.

    Example:
        >>> has_less_range(torch.float16, than=torch.bfloat16)
        True
    """
    return dtype.is_floating_point and than.is_floating_point and torch.finfo(dtype).max < torch.finfo(than).max


def overflows(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether finite numbers are too large for a dtype.

    Example:
        >>> overflows(torch.tensor([1.0, 70000.0]), torch.float16)
        True
        >>> overflows(torch.tensor([65519.0, float("inf")]), torch.float16)  # rounded to 65504; infinite all along
        False
    """
    if not has_less_range(dtype, tensor.dtype):
        return False
    info = torch.finfo(dtype)
    # Half a step beyond the largest number nothing is rounded to it; what a cast does there depends on the dtype.
    limit = info.max + info.eps * 2.0 ** math.floor(math.log2(info.max)) / 2
    numbers = (piece.double().abs() for piece, _ in pieces_of(tensor, tensor))
    return any(bool((piece.isfinite() & (piece >= limit)).any()) for piece in numbers)


def same_bits(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether two tensors of one shape have the same elements in a dtype, bit for bit.

    Example:
        >>> same_bits(torch.tensor([0.0]), torch.tensor([-0.0]), torch.float32)
        False
    """
    return all(torch.equal(_bits(x, dtype), _bits(y, dtype)) for x, y in pieces_of(a, b))


def _bits(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View elements as bytes, of which even NaN equals itself and a zero not another."""
    return tensor.to(dtype).resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
