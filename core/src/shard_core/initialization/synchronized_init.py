"""Values drawn anew after setup: ``torch.nn.init`` gives all ranks those that rank 0 draws, as plain PyTorch would."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shard_core.parameters import laid_out_like

if TYPE_CHECKING:
    from torch import nn

    from shard_core.checkpoint.state.shard import FlatPart

#: Functions of ``torch.nn.init`` that draw nothing, and work on shards.
_PLAIN = ("zeros_", "ones_", "constant_")
#: What ``reset_parameters`` asks for the shape of a weight, from which it draws a bias.
_SHAPES = ("_calculate_fan_in_and_fan_out",)
#: Methods of tensors that draw, which users call past ``torch.nn.init``, and most of its functions do.
_METHODS = ("normal_", "uniform_")

_drawn: weakref.WeakSet[SynchronizedInit] = weakref.WeakSet()


class SynchronizedInit:
    """Synchronizes what ``torch.nn.init``, and with it ``reset_parameters``, draws for a module's parameters.

    Every rank draws whole parameters from its own generator, which goes on as in plain PyTorch, and takes over rank
    0's: were each to keep its own, copies would drift apart, and shards might repeat one another.

    Args:
        module: One that was set up; what one rank draws, every rank has to draw.
        parts: Returns what this rank holds of parameters of which an engine may leave nothing in the module.
        publish: Copies what was written into these to where forwards read it.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Callable[[], Mapping[torch.Tensor, FlatPart]] = dict,
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        self.parameters = set(module.parameters())
        self.parts, self.publish = parts, publish
        self.meshes = {each.device_mesh for each in self.parameters if isinstance(each, DTensor)}
        _drawn.add(self)
        _replace()

    @staticmethod
    def is_needed(module: nn.Module, ranks: int) -> bool:
        """Return whether ranks could draw apart, or shards be drawn otherwise than whole tensors, as by one rank, too.

        Args:
            module: One that was set up.
            ranks: On how many.
        """
        return ranks > 1 or any(isinstance(each, DTensor) for each in module.parameters())

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
        if callable(function) and (name in _SHAPES or (name.endswith("_") and not name.startswith("_"))):
            alike = _seen_whole(function) if name in _SHAPES else _alike(function)
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
        holder, part = (None, None) if tensor.numel() else _part_of(tensor)
        if holder and part:
            _draw_part(part, tensor, function, args, kwargs)
            holder.publish()
            return tensor
        if function.__name__ in _PLAIN:
            return function(*args, **kwargs)
        if isinstance(tensor, DTensor):
            # Data of a shard is another tensor on the same mesh; a split activation is on one of its own.
            if any(tensor.device_mesh in each.meshes for each in _drawn):
                return _draw(tensor, function, args, kwargs)
            return function(*args, **kwargs)
        result = function(*args, **kwargs)
        if tensor.numel() and any(each.holds(tensor) for each in _drawn):
            values = tensor.detach().contiguous()  # a slice may not be
            dist.broadcast(values, src=0)
            tensor.detach().copy_(values)
        return result

    return draw


def _seen_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what asks as a function does for the shape of a parameter, and of the whole where it is spread."""

    @functools.wraps(function)
    def ask(tensor: torch.Tensor) -> Any:
        part = None if tensor.numel() else _part_of(tensor)[1]
        return function(torch.empty(part.shape, device="meta") if part else tensor)

    return ask


def _part_of(tensor: torch.Tensor) -> tuple[SynchronizedInit | None, FlatPart | None]:
    """Return what this rank holds of a parameter with nothing in its module, and whose it is."""
    holder = next((each for each in _drawn if tensor in each.parameters), None)
    part = holder.parts().get(tensor) if holder else None
    return (holder, part) if part and 0 not in part.shape else (None, None)


def _draw(tensor: DTensor, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw a whole tensor, and keep this rank's shard of rank 0's."""
    if tensor.requires_grad and torch.is_grad_enabled() and not hasattr(function, "__code__"):
        return function(*args, **kwargs)  # torch's error: what has gradients is drawn under torch.no_grad()
    with torch.no_grad():
        local = tensor.to_local()
        whole = _filled(
            torch.zeros(tensor.shape, dtype=tensor.dtype, device=local.device), tensor, function, args, kwargs
        )
        whole = whole.to(tensor.device_mesh.device_type)
        dist.broadcast(whole, src=0)
        local.copy_(laid_out_like(tensor, whole).to_local())
    return tensor


@torch.no_grad()
def _draw_part(
    part: FlatPart, tensor: torch.Tensor, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Draw a whole tensor, and keep this rank's part of rank 0's."""
    whole = torch.zeros(part.shape, dtype=tensor.dtype, device=part.values.device)
    _filled(whole, tensor, function, args, kwargs)
    dist.broadcast(whole, src=0)
    part.values.copy_(whole.flatten()[part.start : part.start + part.values.numel()])


def _filled(
    whole: torch.Tensor,
    tensor: torch.Tensor,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Return a tensor that a function has drawn in the place of another."""
    function(whole, *args[1:], **{name: value for name, value in kwargs.items() if value is not tensor})
    return whole
