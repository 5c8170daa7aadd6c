"""Activation offload: what autograd keeps of a forward waits for backward in host memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from shard_core._versions import version_of
from shard_core.errors import SetupError
from shard_core.preparation.submodules import chosen_layers

if TYPE_CHECKING:
    _Packed: TypeAlias = "tuple[torch.Tensor, torch.device | int | None]"
    _Hooks: TypeAlias = "tuple[Callable[[torch.Tensor], _Packed], Callable[[_Packed], torch.Tensor]]"


def layers_to_offload(module: nn.Module, given: Any) -> list[nn.Module]:
    """Find the modules around whose forwards activations are offloaded.

    Args:
        module: The whole module.
        given: The option ``activation_offload``: True for the whole module, False for none; or a class of submodules,
            several, or a function that decides for each submodule.

    Raises:
        InvalidOption: If a class matches no submodule or has no forward, or a function chooses none.
    """
    if isinstance(given, bool):
        return [module] if given else []
    return chosen_layers("activation_offload", given, module)


def offload(layers: Iterable[nn.Module]) -> None:
    """Keep in host memory what the forwards of some modules save for backward.

    Copies are pinned where they come from a device. Parameters, and views of them, are there anyway and are not copied.
    Under activation checkpointing it is the inputs of the layers that are saved, and so copied.

    Args:
        layers: Modules, changed in place.
    """
    # Torch's compiler would take what a view is of for nothing.
    hooks = torch.compiler.disable(_pack), torch.compiler.disable(_unpack)
    for layer in layers:
        if "forward" in vars(layer):
            offloaded = functools.partial(_offloaded, hooks, layer.forward)
            layer.forward = functools.update_wrapper(offloaded, layer.forward)
        else:
            layer.forward = MethodType(functools.partial(_offloaded_forward, hooks), layer)


def _offloaded_forward(hooks: _Hooks, layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _offloaded(hooks, type(layer).forward, layer, *args, **kwargs)


def _offloaded(hooks: _Hooks, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with saved_tensors_hooks(*hooks):
        return forward(*args, **kwargs)


def _pack(tensor: torch.Tensor) -> _Packed:
    if _is_parameter(tensor if tensor._base is None else tensor._base):
        # torch checks versions only of what no hook has seen.
        return tensor, version_of(tensor)
    pinned = tensor.device.type != "cpu" and tensor.layout is torch.strided
    host = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
    # The copy back stands in the same stream, after this one.
    return host.copy_(tensor, non_blocking=pinned), tensor.device


def _is_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, or one cast by autocast, which other operations share."""
    if isinstance(tensor, nn.Parameter):
        return True
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def _unpack(packed: _Packed) -> torch.Tensor:
    tensor, origin = packed
    if isinstance(origin, torch.device):
        return tensor.to(origin, non_blocking=True)
    if version_of(tensor) != origin:
        raise SetupError(
            f"a parameter of shape {tuple(tensor.shape)} was changed in place between the forward that read it and "
            "its backward; step or load after backward."
        )
    return tensor
