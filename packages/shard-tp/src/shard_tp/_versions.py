"""Names of torch without a promise that this distribution leans on, and when they can go.

``torch.Tensor._base`` and ``_ToTorchTensorBackward``, the name of the function by which torch takes a DTensor's local
tensor: they tell the view of it that a split layer returns, whose base nobody else has, from users' own views. Checked
on torch 2.13.0. They can go when ``DTensor.to_local`` returns what may be changed in place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TO_LOCAL = "_ToTorchTensorBackward"


def is_local_view(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is the view of a DTensor's local tensor that torch makes of it."""
    taken = tensor.grad_fn is not None and tensor.grad_fn.name() == _TO_LOCAL
    return taken and tensor._base is not None
