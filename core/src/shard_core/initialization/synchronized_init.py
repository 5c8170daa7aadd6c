"""Values drawn anew after setup: ``torch.nn.init`` gives all ranks those that rank 0 draws, as plain PyTorch would."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shard_core.errors import SetupError
from shard_core.parameters import laid_out_like

if TYPE_CHECKING:
    from torch import nn

#: Functions of ``torch.nn.init`` that draw nothing, and work on parts.
_PLAIN = ("zeros_", "ones_", "constant_")
#: Methods of tensors that draw, which users call past ``torch.nn.init``, and most of its functions do.
_METHODS = ("normal_", "uniform_")

_drawn: weakref.WeakSet[SynchronizedInit] = weakref.WeakSet()


class SynchronizedInit:
    """Synchronizes what ``torch.nn.init``, and with it ``reset_parameters``, draws for a module's parameters.

    Every rank draws whole parameters from its own generator, which goes on as in plain PyTorch, and takes over rank
    0's: were each to keep its own, copies would drift apart, and shards might repeat one another.

    Args:
        module: One that was set up; what one rank draws, every rank has to draw.
        spread: Parameters with elements of which engines may leave nothing in the module.
    """

    def __init__(self, module: nn.Module, spread: Set[torch.Tensor] = frozenset()) -> None:
        self.parameters = set(module.parameters())
        self.spread = spread
        self.meshes = {each.device_mesh for each in self.parameters if isinstance(each, DTensor)}
        _drawn.add(self)
        _replace()

    @staticmethod
    def is_needed(module: nn.Module, ranks: int, spread: Set[torch.Tensor] = frozenset()) -> bool:
        """Return whether ranks could draw apart, or shards be drawn otherwise than whole tensors, as by one rank, too.

        Args:
            module: One that was set up.
            ranks: On how many.
            spread: As for the class.
        """
        return ranks > 1 or bool(spread) or any(isinstance(each, DTensor) for each in module.parameters())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one of the parameters, its data or a slice of it."""
        place = tensor.untyped_storage().data_ptr()
        return any(
            each.untyped_storage().data_ptr() == place for each in self.parameters if not isinstance(each, DTensor)
        )

    def remove(self) -> None:
        """Stop synchronizing: each rank draws the module's parameters for itself again."""
        _drawn.discard(self)


@functools.cache  # once in a process
def _replace() -> None:
    """Replace functions where they are defined, and in torch's own layers, some of which have imported them by name."""
    layers = [module for name, module in list(sys.modules.items()) if name.startswith("torch.nn.modules.")]
    for name, function in list(vars(torch.nn.init).items()):
        if name.endswith("_") and not name.startswith("_") and name not in _PLAIN and callable(function):
            alike = _alike(function)
            for module in (torch.nn.init, *(each for each in layers if vars(each).get(name) is function)):
                setattr(module, name, alike)
    for name in _METHODS:
        setattr(DTensor, name, _alike(getattr(torch.Tensor, name)))


def _alike(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what draws as a function does, and alike on all ranks where it draws a parameter that was set up."""

    @functools.wraps(function)
    def draw(*args: Any, **kwargs: Any) -> Any:
        tensor = args[0] if args else kwargs.get("tensor")
        if not isinstance(tensor, torch.Tensor) or not _drawn:
            return function(*args, **kwargs)
        if isinstance(tensor, DTensor):
            # Data of a shard is another tensor on the same mesh; a split activation is on one of its own.
            if any(tensor.device_mesh in each.meshes for each in _drawn):
                return _draw(tensor, function, args, kwargs)
            return function(*args, **kwargs)
        if not tensor.numel() and any(tensor in each.spread for each in _drawn):
            raise SetupError(
                f"{function.__name__}() was given a parameter whose values are spread over ranks just now, with none "
                "in the module; draw weights before setup."
            )
        result = function(*args, **kwargs)
        if tensor.numel() and any(each.holds(tensor) for each in _drawn):
            values = tensor.detach().contiguous()  # a slice may not be
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)
        return result

    return draw


def _draw(tensor: DTensor, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw a whole tensor, and keep this rank's shard of rank 0's."""
    if tensor.requires_grad and torch.is_grad_enabled() and not hasattr(function, "__code__"):
        return function(*args, **kwargs)  # torch's error: what has gradients is drawn under torch.no_grad()
    with torch.no_grad():
        local = tensor.to_local()
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype, device=local.device)
        given = {name: value for name, value in kwargs.items() if value is not tensor}
        function(whole, *args[1:], **given)
        whole = whole.to(tensor.device_mesh.device_type)
        dist.broadcast(whole, src=0)
        local.copy_(laid_out_like(tensor, whole).to_local())
    return tensor
