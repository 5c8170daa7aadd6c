"""Casting modules and inputs to the dtypes a policy names, and checking that they have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import PrecisionMismatch

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
    """Cast the floating-point tensors in nested tuples, named ones too, lists and dicts.

    Args:
        data: Arguments of a forward.
        dtype: What to cast to.

    Returns:
        The same structure; anything but floating-point tensors is passed through.
    """
    if isinstance(data, torch.Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, tuple):
        items = (convert_input(item, dtype) for item in data)
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if isinstance(data, list):
        return [convert_input(item, dtype) for item in data]
    if type(data) is dict:
        return {key: convert_input(item, dtype) for key, item in data.items()}
    return data
