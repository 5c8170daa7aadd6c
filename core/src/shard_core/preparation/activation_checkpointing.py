"""Activation checkpointing: what a layer computes in forward is computed again in backward instead of being kept."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

from shard_core.preparation.submodules import has_forward, of_classes

if TYPE_CHECKING:
    from torch import nn


def recompute(
    module: nn.Module, layers: type[nn.Module] | Iterable[type[nn.Module]] | Callable[[nn.Module], bool]
) -> None:
    """Checkpoint the activations of some submodules: only their inputs are kept between forward and backward.

    Their forwards are exchanged, nothing is wrapped: parameters keep their names, and hooks of the engine, which
    stand outside of the forward, do not run again in backward.

    Args:
        module: The whole module.
        layers: A class of submodules, several, or a function that decides for each submodule.

    Raises:
        InvalidOption: If a class matches no submodule, or has no forward.
    """
    for layer in _chosen(module, layers):
        if "forward" in vars(layer):
            # Somebody has exchanged it before; compiled, such a layer may need a graph of its own.
            layer.forward = functools.update_wrapper(functools.partial(_recomputed, layer.forward), layer.forward)
        else:
            layer.forward = MethodType(_recomputed_forward, layer)


def _recomputed_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # Nothing in here belongs to one layer, so that compiled layers of a class share a graph.
    return _recomputed(type(layer).forward, layer, *args, **kwargs)


def _recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _chosen(module: nn.Module, layers: Any) -> list[nn.Module]:
    if isinstance(layers, type):
        layers = [layers]
    if isinstance(layers, Iterable):
        return of_classes("activation_checkpointing", layers, module)
    return [part for part in module.modules() if part is not module and has_forward(type(part)) and layers(part)]
