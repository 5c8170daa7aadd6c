"""Filling a sharded module with the values of its recorded constructors, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_core.errors import CannotReplay, SetupError
from shard_core.initialization.recording import Recording, is_recorded, recording_of
from shard_core.parameters import laid_out_like, local_part

if TYPE_CHECKING:
    from shard_core.collectives.interface import Collectives


class Materializer:
    """Takes a module without values through sharding.

    Order of calls: the constructor before the module is sharded; ``allocate`` after it was;
    ``pop_optimizer_state`` before optimizers are pointed at the new parameters; ``fill`` last.

    Args:
        module: A module that was built while recording; its tensors without values are replaced by
            ones on the meta device, ties kept.
        parameter_dtype: What floating-point parameters are to be stored in.
        buffer_dtype: The same for buffers.
    """

    def __init__(self, module: nn.Module, parameter_dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
        self._module = module
        self._recorded: dict[str, torch.Tensor] = {}
        self._targets: dict[str, torch.Tensor] = {}
        self._popped: list[tuple[torch.optim.Optimizer, dict[str, Any], int, str, torch.Tensor]] = []
        replaced: dict[int, torch.Tensor] = {}
        for name, tensor, owner in list(_named_tensors(module)):
            if is_recorded(tensor):
                if id(tensor) not in replaced:
                    self._recorded[name] = tensor
                    is_parameter = isinstance(tensor, nn.Parameter)
                    replaced[id(tensor)] = _on_meta(tensor, parameter_dtype if is_parameter else buffer_dtype)
                setattr(owner, _last(name), replaced[id(tensor)])

    def allocate(self, device: torch.device, *, parameters: torch.device | None = None) -> None:
        """Allocate memory for this rank's part of every tensor.

        Args:
            device: Where the parts live.
            parameters: Where those of parameters that are sharded live, if elsewhere.
        """
        made: dict[int, torch.Tensor] = {}
        for name, tensor, owner in list(_named_tensors(self._module)):
            if tensor.device.type != "meta":
                continue
            if id(tensor) not in made:
                # What the engine does not shard it does not bring to the device either.
                memory = torch.empty_like(tensor, device=(parameters or device) if _is_sharded(tensor) else device)
                if isinstance(tensor, nn.Parameter):
                    parameter = nn.Parameter(memory, requires_grad=tensor.requires_grad)
                    parameter.__dict__.update(tensor.__dict__)
                    memory = parameter
                made[id(tensor)] = self._targets[name] = memory
            setattr(owner, _last(name), made[id(tensor)])

    def pop_optimizer_state(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Remove optimizer state without values, until ``fill`` restores it with values.

        Args:
            optimizers: Optimizers about to be pointed at the module's new parameters.
        """
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for position, parameter in enumerate(group["params"]):
                    slots = optimizer.state.get(parameter, {})
                    for slot in [slot for slot, value in slots.items() if is_recorded(value)]:
                        self._popped.append((optimizer, group, position, slot, slots.pop(slot)))

    def fill(self, *, parameters: bool = True) -> None:
        """Replay what the constructors did and keep this rank's part of every value.

        Args:
            parameters: False leaves parameters to a checkpoint: they hold NaN until it is loaded.
        """
        for number, (optimizer, group, position, slot, value) in enumerate(self._popped):
            parameter = group["params"][position]
            memory = torch.empty_like(parameter if value.shape == parameter.shape else value)
            optimizer.state[parameter][slot] = memory
            key = f"state {number} ({slot})"
            self._recorded[key], self._targets[key] = value, memory
        recordings: dict[Recording, dict[str, torch.Tensor]] = {}
        for name, tensor in self._recorded.items():
            if parameters or not isinstance(tensor, nn.Parameter):
                recordings.setdefault(recording_of(tensor), {})[name] = tensor
            else:
                self._targets[name].detach().fill_(math.nan)
        for recording, wanted in recordings.items():
            recording.replay(wanted, self._deliver)

    def _deliver(self, name: str, value: torch.Tensor) -> None:
        with torch.no_grad():
            target = self._targets[name]
            target.copy_(laid_out_like(target, value))


def unset_parameters(module: nn.Module) -> list[str]:
    """List the parameters that still wait for a checkpoint, as far as this rank holds them.

    Args:
        module: A module that was filled with ``parameters=False``.

    Returns:
        The names of parameters all of whose local elements are NaN.
    """
    return [
        name
        for name, parameter in module.named_parameters()
        if (local := local_part(parameter)).numel() and bool(local.isnan().all())
    ]


def refuse_unset(module: nn.Module, collectives: Collectives) -> None:
    """Register a check before a module's first forward that a checkpoint has filled every parameter.

    Args:
        module: A module that was filled with ``parameters=False``.
        collectives: Of all ranks, which refuse together.
    """

    def check(called: nn.Module, args: Any) -> None:
        del args
        unset = collectives.gather_objects(unset_parameters(called))
        names = sorted({name for names in unset for name in names})
        if names:
            raise SetupError(
                f"{len(names)} parameters were built with empty_init=True and never filled, first {names[0]!r}; "
                "call load_checkpoint() or load_weights() before the first forward."
            )
        handle.remove()

    handle = module.register_forward_pre_hook(check, prepend=True)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, nn.Module]]:
    """Yield every tensor a module has under every name, with the submodule that owns it.

    Parameters and buffers first, then plain attributes, which ``.to()`` would pass over.
    """
    for prefix, owner in module.named_modules(remove_duplicate=False):
        attributes = {name: value for name, value in vars(owner).items() if not name.startswith("_")}
        tensors: list[tuple[str, Any]] = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
            *((name, value) for name, value in attributes.items() if isinstance(value, torch.Tensor)),
        ]
        for name, tensor in tensors:
            yield f"{prefix}.{name}" if prefix else name, tensor, owner
        for name, value in attributes.items():
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if any(is_recorded(part) for part in parts):
                raise CannotReplay(
                    f"{type(owner).__name__}.{name} keeps tensors in a {type(value).__name__}, where their values "
                    "cannot be filled in; register them as buffers, or build the module outside module_init_context()."
                )


def _on_meta(tensor: torch.Tensor, floating: torch.dtype) -> torch.Tensor:
    dtype = floating if tensor.is_floating_point() else tensor.dtype
    empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    # Libraries mark parameters with attributes of their own, which must survive.
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def _is_sharded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and isinstance(tensor, DTensor)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
