"""Torch's own optimizers over this rank's shards as plain tensors, with the fastest kernel that nobody ruled out."""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shard_core.optim.classification import why_not_elementwise
from shard_core.optim.kernels import can_use_kernel, fastest_kernel, fused_step_counter, inside_step, is_torch_step
from shard_core.parameters import local_part, sharded_like

Closure = Callable[[], Any]

#: By optimizer: how many groups it had, and its settings while it steps shards; None if it has to step DTensors.
_decided: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, Mapping[str, bool] | None]] = (
    weakref.WeakKeyDictionary()
)


@contextlib.contextmanager
def local_step(optimizer: torch.optim.Optimizer) -> Iterator[Callable[[Closure], Closure]]:
    """Set an optimizer to step the local tensors of DTensors; a step inside costs no work on layouts.

    This holds for torch's own optimizers that work element by element. If all groups leave both ``fused`` and
    ``foreach`` open, the fastest of torch's kernels for the device is taken for the step. Groups, state and settings
    are outside the step what they would be without; hooks on the step, too, see them so. An optimizer without DTensors,
    or of another kind, steps as ever.

    Args:
        optimizer: The user's. Inside, call ``step`` once.

    Yields:
        What makes of a closure the one to step with: it runs the module, whose parameters are what they are outside.
    """
    _shard_whole_state(optimizer)
    groups, settings = _decided.get(optimizer, (0, None))
    if groups != len(optimizer.param_groups):
        settings = _settings_on_shards(optimizer)
        _decided[optimizer] = len(optimizer.param_groups), settings
    if settings is None:
        yield lambda closure: closure
        return
    shards = _Shards(optimizer, settings)
    with inside_step(optimizer, shards.swap_in, shards.swap_out):
        yield shards.outside


def _shard_whole_state(optimizer: torch.optim.Optimizer) -> None:
    """Shard whole tensors that the user has put into the state of DTensors, which their shards could not be mixed with.

    Torch broadcasts a shard and a whole tensor, or steps the shard by the elements that come first.
    """
    for parameter, slots in optimizer.state.items():
        if isinstance(parameter, DTensor) and isinstance(slots, dict):
            for slot, value in slots.items():
                if type(value) is torch.Tensor and value.dim():  # looked at in every step, and hardly ever so
                    slots[slot] = sharded_like(parameter, value)


def _settings_on_shards(optimizer: torch.optim.Optimizer) -> Mapping[str, bool] | None:
    """Choose how an optimizer steps shards; an overridden step may use more of parameters than their elements."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    sharded = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
    if not sharded or not is_torch_step(optimizer):
        return None
    device = sharded[0].to_local().device
    return None if why_not_elementwise(optimizer, device) is not None else fastest_kernel(optimizer, device)


class _Shards:
    """An optimizer's parameters, gradients and state as plain tensors, for one step."""

    def __init__(self, optimizer: torch.optim.Optimizer, settings: Mapping[str, bool]) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, Mapping[str, Any]]] = []
        self._state: defaultdict[torch.Tensor, Any] | None = None

    def outside(self, closure: Closure) -> Closure:
        """Wrap a closure, with which torch's optimizers begin a step, to find the optimizer as it is outside of one."""

        def evaluate() -> Any:
            self.swap_out()
            try:
                return closure()
            finally:
                self.swap_in()

        return evaluate

    @torch.no_grad()
    def swap_in(self, *_: object) -> None:
        """Replace the DTensors by the shards."""
        optimizer = self._optimizer
        usable = [can_use_kernel(self._settings, optimizer, group) for group in optimizer.param_groups]
        self._state, optimizer.state = optimizer.state, defaultdict(dict)
        for group, uses_kernel in zip(optimizer.param_groups, usable, strict=True):
            changed: dict[str, Any] = {"params": [self._shard(each) for each in group["params"]]}
            if uses_kernel:
                changed |= self._settings
            self._groups.append((group, {name: group[name] for name in changed}))
            group.update(changed)

    @torch.no_grad()
    def swap_out(self, *_: object) -> None:
        """Restore the DTensors, and take over what became of the state."""
        for group, settings in self._groups:
            group.update(settings)
        self._groups.clear()
        if self._state is None:
            return
        stepped, self._optimizer.state, self._state = self._optimizer.state, self._state, None
        for parameter, shard, before in self._pairs:
            # Let go of one by one: new state is there twice, as it was made and laid out.
            for slot, value in stepped.pop(shard, {}).items():
                if value is not before.get(slot):
                    self._optimizer.state[parameter][slot] = _laid_out_like(parameter, value)
        self._pairs.clear()

    def _shard(self, parameter: torch.Tensor) -> torch.Tensor:
        shard, gradient = local_part(parameter), parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
            gradient = gradient.to_local()
        shard.grad = gradient
        before = {}
        if self._state and parameter in self._state:
            before = {
                slot: value.to_local() if isinstance(value, DTensor) else value
                for slot, value in self._state[parameter].items()
            }
            self._optimizer.state[shard] = {**before, **self._counted(before, shard)}
        self._pairs.append((parameter, shard, before))
        return shard

    def _counted(self, slots: Mapping[str, Any], shard: torch.Tensor) -> Mapping[str, torch.Tensor]:
        if "step" not in slots or not self._settings.get("fused"):
            return {}
        return {"step": fused_step_counter(slots["step"], shard)}


def _laid_out_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return new state laid out like its parameter, on whichever device that keeps its shards."""
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not isinstance(parameter, DTensor):
        return value
    laid_out = torch.empty_like(parameter, dtype=value.dtype)
    local_part(laid_out).copy_(value)
    return laid_out
