"""The names a module's tensors have in a checkpoint: the user's own, each tensor once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from shard_core.errors import CheckpointError
from shard_core.parameters import plain_name

if TYPE_CHECKING:
    from shard_core.checkpoint.state.shard import FlatPart


class NamedTensors(Protocol):
    """The tensors of one module, known by the user's names for them, however an engine keeps them."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """The further names of tied tensors, and the first."""

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of this very tensor, or None if the module does not have it."""

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor of a name."""


class ModuleTensors:
    """Parameters and persistent buffers of one module by name, tied ones apart.

    Args:
        owner: The user's name for the module, for messages.
        module: Any module; wrappers inside it leave no trace in the names.
        flat_part: Returns which range of a tensor's elements this rank holds, where an engine keeps it flat.

    Attributes:
        tensors: Each tensor under the first of its names.
        aliases: The further names of tied tensors, and the first.
        parts: What this rank holds of the tensors that are kept flat, by name.

    Raises:
        CheckpointError: If the module keeps state that is no tensor, or two tensors would share a name.

    Example:
        >>> tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        >>> tied[1].weight = tied[0].weight
        >>> tensors = ModuleTensors("model", tied)
        >>> list(tensors.tensors), tensors.aliases
        (['0.weight'], {'1.weight': '0.weight'})
        >>> tensors.name_of(tied[1].weight), tensors.shape_of("0.weight")
        ('0.weight', (3, 3))
    """

    def __init__(
        self, owner: str, module: nn.Module, flat_part: Callable[[torch.Tensor], FlatPart | None] | None = None
    ) -> None:
        # Besides showing which buffers are persistent, this makes an engine put its sharded parameters back where
        # full ones stand since the last forward.
        state = module.state_dict(keep_vars=True)
        extra = [name for name in state if name.endswith("_extra_state")]
        if extra:
            raise CheckpointError(
                f"module {owner!r} keeps {plain_name(extra[0])!r} through get_extra_state(), which a checkpoint does "
                "not hold; put the value into a buffer."
            )
        kept = {id(value) for value in state.values()}
        self.tensors: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.parts: dict[str, FlatPart] = {}
        self._names: dict[int, str] = {}
        for name, tensor in _named(module):
            if isinstance(tensor, nn.Parameter) or id(tensor) in kept:
                self._add(owner, name, tensor)
        own = module._flat_parts if isinstance(module, BareModule) else {}
        for name, tensor in self.tensors.items():
            part = own.get(tensor) or (flat_part(tensor) if flat_part else None)
            if part is not None:
                self.parts[name] = part
                self._names[id(part.values)] = name

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of this very tensor, or of what is held of one; None if the module does not have it."""
        return self._names.get(id(tensor))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the full shape of a tensor."""
        return self.parts[name].shape if name in self.parts else tuple(self.tensors[name].shape)

    def _add(self, owner: str, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors or name in self.aliases:
            raise CheckpointError(f"module {owner!r} has two tensors called {name!r} once wrappers are taken off.")
        first = self._names.setdefault(id(tensor), name)
        if first == name:
            self.tensors[name] = tensor
        else:
            self.aliases[name] = first


class BareModule(nn.Module):
    """Holds tensors by their dotted names, for a checkpoint to keep, and computes nothing.

    Args:
        tensors: By name; a tied one under each of its names.
        parts: Of which whole tensors some of them are this rank's parts.

    Example:
        >>> bare = BareModule({"head.scale": torch.ones(2)}, {})
        >>> ModuleTensors("averages", bare).tensors
        {'head.scale': tensor([1., 1.])}
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], parts: Mapping[torch.Tensor, FlatPart]) -> None:
        super().__init__()
        self._flat_parts = parts  # a name that no module of a user's has
        for path, tensor in tensors.items():
            parents, _, name = path.rpartition(".")
            owner: nn.Module = self
            for each in parents.split(".") if parents else ():
                if each not in dict(owner.named_children()):
                    owner.add_module(each, nn.Module())
                owner = owner.get_submodule(each)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(name, tensor)
            else:
                owner.register_buffer(name, tensor)


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    wrapped = [
        f"{name}.module." if name else "module."
        for name, inner in module.named_modules(remove_duplicate=False)
        if isinstance(inner, nn.parallel.DistributedDataParallel | nn.DataParallel)
    ]
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            for prefix in sorted(wrapped, key=len, reverse=True):
                if name.startswith(prefix):
                    name = prefix.removesuffix("module.") + name[len(prefix) :]  # noqa: PLW2901
            yield plain_name(name), tensor
