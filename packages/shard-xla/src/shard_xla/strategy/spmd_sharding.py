"""Sharding tensors over all devices of a process: the mesh, and along which dim."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from shard_core.backend import move_hooks

if TYPE_CHECKING:
    from torch import nn

    from shard_xla.config import XLASPMDConfig

AXIS = "fsdp"
"""The one axis of the mesh; upstream's wrapper wants this name."""


def make_mesh() -> Any:
    """Build a mesh of all devices of the process on one axis."""
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    devices = xr.global_runtime_device_count()
    return xs.Mesh(np.arange(devices), (devices,), (AXIS,))


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move a module's tensors, with their hooks; tied ones stay tied, as by ``Module.to`` they do not on this device.

    Args:
        module: In host memory.
        device: XLA's.
    """
    moved: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) not in moved:
                there = torch.nn.Parameter(parameter.detach().to(device), requires_grad=parameter.requires_grad)
                move_hooks(parameter, there)
                moved[id(parameter)] = there
            setattr(part, name, moved[id(parameter)])
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            setattr(part, name, moved[id(buffer)])


def shard_tensor(tensor: torch.Tensor, mesh: Any) -> torch.Tensor:
    """Shard a tensor along its largest dim, over all devices; one without dims or elements stays whole on each.

    One that is spread already stays so: of what torch makes in a step the compiler chooses the dim.

    Args:
        tensor: On XLA's device.
        mesh: The devices.

    Returns:
        The tensor.
    """
    import torch_xla.distributed.spmd as xs

    if isinstance(xs.wrap_if_sharded(tensor), xs.XLAShardedTensor):
        return tensor
    spec: list[str | None] = [None] * tensor.dim()
    if spec and tensor.numel():
        spec[tensor.shape.index(max(tensor.shape))] = AXIS
    xs.mark_sharding(tensor, mesh, tuple(spec))
    return tensor


def shard_samples(data: Any, mesh: Any) -> None:
    """Shard the tensors in a nested structure along their first dim, where that gives equal parts.

    Args:
        data: Inputs or outputs of a module.
        mesh: The devices.
    """
    import torch_xla.distributed.spmd as xs

    for tensor in pytree.tree_leaves(data):
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "xla" or tensor.dim() == 0:
            continue
        if tensor.shape[0] and tensor.shape[0] % mesh.size() == 0:
            xs.mark_sharding(tensor, mesh, (AXIS, *[None] * (tensor.dim() - 1)))


def wrap(module: nn.Module, config: XLASPMDConfig, mesh: Any) -> nn.Module:
    """Wrap a module whose parameters are sharded, so that what goes in and comes out is sharded by samples.

    Args:
        module: On XLA's device.
        config: The options.
        mesh: The devices.

    Returns:
        What to call.
    """
    from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

    from shard_xla.strategy.units import recompute, wrap_policy

    recompute(module, config)
    make: Callable[..., nn.Module] = functools.partial(
        SpmdFullyShardedDataParallel, mesh=mesh, shard_output=config.shard_output or shard_samples
    )
    root = make(module, auto_wrap_policy=wrap_policy(module, config))

    def shard_inputs(called: nn.Module, args: Any, kwargs: Any) -> None:
        del called
        shard_samples((args, kwargs), mesh)

    root.register_forward_pre_hook(shard_inputs, with_kwargs=True)
    return root
