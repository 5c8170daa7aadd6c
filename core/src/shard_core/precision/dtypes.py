"""Casting modules and inputs to the dtypes a policy names, and checking that they have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import PrecisionMismatch
from shard_core.structures import is_nested, map_leaves

if TYPE_CHECKING:
    from shard_core.precision.interface import PrecisionPolicy


def dtype_named(name: str) -> torch.dtype:
    """Return a torch dtype by the name a policy uses.

    Args:
        name: For example ``"bfloat16"``.

    Returns:
        The dtype.

    Example:
        >>> dtype_named("bfloat16")
        torch.bfloat16
    """
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def convert_module(module: torch.nn.Module, policy: PrecisionPolicy) -> torch.nn.Module:
    """Cast floating-point parameters and buffers in place to a policy's dtypes.

    Args:
        module: Any module; ties and parameter objects stay as they are.
        policy: The table of dtypes.

    Returns:
        The same module.
    """
    parameter, buffer = dtype_named(policy.parameter), dtype_named(policy.buffer)
    for tensors, dtype in ((module.parameters(), parameter), (module.buffers(), buffer)):
        for tensor in tensors:
            if tensor.is_floating_point() and tensor.dtype != dtype:
                tensor.data = tensor.data.to(dtype)
    return module


def check_module(module: torch.nn.Module, policy: PrecisionPolicy) -> None:
    """Compare the dtypes a module really has with a policy's.

    Args:
        module: A module that was set up.
        policy: The table of dtypes.

    Raises:
        PrecisionMismatch: Naming the first tensor that differs.
    """
    kinds = (
        ("parameter", policy.parameter, module.named_parameters()),
        ("buffer", policy.buffer, module.named_buffers()),
    )
    for kind, expected, tensors in kinds:
        for name, tensor in tensors:
            if tensor.is_floating_point() and tensor.dtype != dtype_named(expected):
                found = str(tensor.dtype).removeprefix("torch.")
                raise PrecisionMismatch(
                    f"precision {policy.name!r} keeps {kind}s in {expected}, but {name!r} is {found} after "
                    "setup; something cast it back, or the strategy does not honour this precision."
                )


def convert_input(data: Any, dtype: torch.dtype) -> Any:
    """Cast the floating-point tensors in nested structures: containers of any kind, named tuples and dataclasses.

    Args:
        data: Arguments of a forward.
        dtype: What to cast to.

    Returns:
        Structures of the same types, and those in which nothing is cast themselves: a forward may fill a list or dict
        that it is given. A tensor that stands in several places is one tensor there, too.

    Example:
        >>> losses = []
        >>> inputs, filled = convert_input((torch.ones(2), losses), torch.float64)
        >>> inputs.dtype, filled is losses
        (torch.float64, True)
    """
    return _Conversion(dtype).of(data)


class _Conversion:
    """Casts what one forward is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._cast: dict[int, torch.Tensor] = {}

    def of(self, data: Any) -> Any:
        """Return what stands in the place of a tensor or structure."""
        if isinstance(data, torch.Tensor):
            return self._of_tensor(data)
        if not is_nested(data):
            return data
        held = _held(data)
        new = [self.of(each) for each in held]
        if all(after is before for after, before in zip(new, held, strict=True)):
            return data
        if type(data) is dict:
            return dict(zip(data, new, strict=True))
        if type(data) in (list, tuple):
            return type(data)(new)
        return map_leaves(data, lambda _, each: self.of(each), is_leaf=lambda each: each is not data)

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype == self._dtype:
            return tensor
        if id(tensor) not in self._cast:
            self._cast[id(tensor)] = tensor.to(self._dtype)
        return self._cast[id(tensor)]


def _held(data: Any) -> list[Any]:
    """List what a structure holds."""
    if isinstance(data, Mapping):
        return list(data.values())
    if isinstance(data, list | tuple):
        return list(data)
    return [getattr(data, field.name) for field in dataclasses.fields(data)]
