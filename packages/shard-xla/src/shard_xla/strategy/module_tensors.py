"""What stands where: a module's tensors by the user's names, however wrappers and devices hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from shard_core import CheckpointError, SetupError
from shard_core.backend import ModuleTensors as KeptTensors
from shard_core.backend import plain_name
from shard_xla._versions import without_wrappers
from shard_xla.checkpoint import flat_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from shard_core.backend import ParameterNames


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a tensor hangs; wrappers come between modules, but an owner stays the owner.

    Attributes:
        owner: The module.
        attribute: Its attribute.
        shape: The whole tensor's shape.
        is_parameter: Whether it is a parameter, not a buffer.
    """

    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    is_parameter: bool

    @property
    def tensor(self) -> torch.Tensor:
        """Return the tensor that is there now."""
        named = self.owner.named_parameters if self.is_parameter else self.owner.named_buffers
        return dict(named(recurse=False, remove_duplicate=False))[self.attribute]


class ModuleTensors:
    """A module's parameters and persistent buffers, noted before anything was wrapped around its parts.

    Args:
        module: The user's, as it was given.
        shapes: Of the whole tensors of which it holds shards, by name.

    Attributes:
        places: Each tensor under the first of its names.
        aliases: The further names of tied tensors, and the first.
    """

    def __init__(self, module: nn.Module, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.places: dict[str, Place] = {}
        self.aliases: dict[str, str] = {}
        self._everywhere: dict[str, Place] = {}
        state = module.state_dict(keep_vars=True)
        self._extra = next((plain_name(name) for name in state if name.endswith("_extra_state")), None)
        first: dict[int, str] = {}
        for raw, tensor in _named(module):
            path, _, attribute = raw.rpartition(".")
            name = plain_name(raw)
            place = Place(
                owner=module.get_submodule(path),
                attribute=attribute,
                shape=(shapes or {}).get(name, tuple(tensor.shape)),
                is_parameter=isinstance(tensor, torch.nn.Parameter),
            )
            self._everywhere[name] = place
            if not place.is_parameter and raw not in state:
                continue
            owner = first.setdefault(id(tensor), name)
            if owner == name:
                self.places[name] = place
            else:
                self.aliases[name] = owner

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters as they are now, under each of their names."""
        return {name: place.tensor for name, place in self._everywhere.items() if place.is_parameter}

    def name_of(self, tensor: torch.Tensor) -> str | None:
        """Return the name of this very parameter, or None if the module does not have it."""
        return next(
            (name for name, place in self.places.items() if place.is_parameter and place.tensor is tensor), None
        )

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor of a name."""
        return self._everywhere[name].shape

    def check_complete(self, module: str) -> None:
        """Refuse to save a module that keeps state which is no tensor.

        Args:
            module: The user's name for it.

        Raises:
            CheckpointError: Naming that state.
        """
        if self._extra is not None:
            raise CheckpointError(
                f"module {module!r} keeps {self._extra!r} through get_extra_state(), which a checkpoint does not hold; "
                "put the value into a buffer."
            )

    def tie_buffers(self) -> None:
        """Tie buffers again that were moved to the device one by one."""
        for alias, name in self.aliases.items():
            if not self.places[name].is_parameter:
                there = self._everywhere[alias]
                setattr(there.owner, there.attribute, self.places[name].tensor)


def tensors_of_average(module: nn.Module) -> ModuleTensors:
    """Describe what an average of weights keeps: a module of this rank's shards, which was never set up.

    Args:
        module: The average's.
    """
    parts = KeptTensors("average", module).parts
    return ModuleTensors(module, {name: part.shape for name, part in parts.items()})


def check_on_host(names: ParameterNames) -> None:
    """Refuse a module that is elsewhere: on its way to an XLA device, ties would have been lost.

    Args:
        names: Its parameters.

    Raises:
        SetupError: Naming the first parameter that is not in host memory.
    """
    for parameter in names.parameters():
        if parameter.device.type != "cpu":
            raise SetupError(
                f"parameter {names.of(parameter)!r} is on {parameter.device}; leave the module on the CPU, setup takes "
                "its parts to the device (`module.to('xla')` would untie tied weights without a word)."
            )


def release(names: ParameterNames) -> None:
    """Free the host memory of parameters that live on the device now.

    Args:
        names: The parameters as they were.
    """
    for parameter in names.parameters():
        if parameter.device.type == "cpu":
            parameter.data = torch.empty((0,) * max(1, parameter.dim()), dtype=parameter.dtype)


def take_own_names(module: nn.Module) -> None:
    """Make ``load_state_dict`` of a module with wrappers in it accept the user's names, too.

    Args:
        module: The user's.
    """

    def rename(module: nn.Module, values: dict[str, Any], prefix: str, *rest: Any) -> None:
        del rest
        for key in module.state_dict(keep_vars=True):
            if prefix + without_wrappers(key) in values:
                values[prefix + key] = values.pop(prefix + without_wrappers(key))

    module.register_load_state_dict_pre_hook(rename)


def take_whole_values(module: nn.Module, tensors: ModuleTensors, rank: int) -> None:
    """Make ``load_state_dict`` of a module whose parameters are shards accept whole values, too.

    Args:
        module: The user's, sharded.
        tensors: Where its parameters are.
        rank: This rank.
    """

    def slice_values(module: nn.Module, values: dict[str, Any], prefix: str, *rest: Any) -> None:
        del rest
        shards = tensors.parameters
        names = {prefix + key: without_wrappers(key) for key in module.state_dict(keep_vars=True)}
        given = {key: name for key, name in names.items() if key in values and name in shards}
        # Some shards are as long as the whole parameter: what comes along decides which was given.
        if all(values[key].shape == shards[name].shape for key, name in given.items()):
            return
        for key, name in given.items():
            if tuple(values[key].shape) == tensors.shape_of(name):
                values[key] = flat_part(values[key], shards[name], rank=rank)

    module.register_load_state_dict_pre_hook(slice_values)


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
