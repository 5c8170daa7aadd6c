"""Whole values that ``load_state_dict`` gives a module whose parameters are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shard_core import SetupError
from shard_deepspeed import _versions

if TYPE_CHECKING:
    from shard_core.backend import FlatPart


class WholeLoads:
    """Fills this rank's parts from whole values, where torch would find a parameter without elements.

    Args:
        module: The user's.
        parts: What of each parameter this rank holds, by the parameter's id.
        take: Copies what was written into the module's parameters into the parts.
        record: Records that module and parts are the same.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        parts: Mapping[int, FlatPart],
        take: Callable[[], None],
        record: Callable[[], None],
    ) -> None:
        self._parts, self._take, self._record = parts, take, record
        self._waiting: dict[torch.nn.Module, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        self._handles: list[Any] = []
        for part in module.modules():
            self._handles.append(part.register_load_state_dict_pre_hook(self._begin))
            self._handles.append(part.register_load_state_dict_post_hook(self._end))

    def remove(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def _begin(
        self, module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Mapping[str, Any], *_: object
    ) -> None:
        """Set aside, before torch loads anything, what it has no room for."""
        self._waiting.pop(module, None)
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if value is not None and metadata.get("assign_to_params_buffers"):
                raise SetupError(
                    f"load_state_dict() was given {prefix + name!r} to assign, and DeepSpeed's stage 3 would no longer "
                    "know the parameter; leave assign at False."
                )
            if id(parameter) not in self._parts or not _versions.is_away(parameter):
                continue
            if not isinstance(value, torch.Tensor) or type(value) not in _PLAIN:
                continue  # which core refuses by name
            if tuple(value.shape) != (shape := _versions.full_shape(parameter)):
                raise SetupError(
                    f"load_state_dict() was given {prefix + name!r} in the shape {tuple(value.shape)}, and the "
                    f"parameter's is {shape}; nothing of this module was loaded."
                )
            found[prefix + name] = (parameter, value)
        if found:
            self._take()
            self._waiting[module] = found
            for key in found:
                del state_dict[key]

    @torch.no_grad()
    def _end(self, module: torch.nn.Module, incompatible: Any) -> None:
        """Fill the parts; torch, which did not see these keys, is told that they were there."""
        waiting = self._waiting.pop(module, None)
        if waiting is None:
            return
        self._take()
        for parameter, value in waiting.values():
            part = self._parts[id(parameter)]
            own = part.values
            own.copy_(value.detach().reshape(-1).narrow(0, part.start, own.numel()))
            shard = _versions.stored_shard(parameter)
            assert shard is not None
            shard[: own.numel()].copy_(own)
        self._record()
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key not in waiting]


_PLAIN = (torch.Tensor, torch.nn.Parameter)
