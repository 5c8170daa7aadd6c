"""Optimizers over parts of parameters, and their state."""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from shard_core.backend import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shard_core.backend import FlatPart
    from shard_deepspeed.zero.trained_parameter import TrainedParameter


class StateOfParts(defaultdict[Any, Any]):
    """State by part, which is found by the module's parameter, too: loops forget or change it by that.

    Args:
        state: What the optimizer had in its place.
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._parts: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def note(self, trained_parameters: Iterable[TrainedParameter]) -> None:
        """Have state be found by these."""
        for each in trained_parameters:
            self._parts[id(each.parameter)] = weakref.ref(each.parameter), each.part.values

    def finds(self, parameter: torch.Tensor) -> bool:
        """Return whether state is found by a parameter of a module."""
        return self._part(parameter) is not parameter

    def _part(self, key: Any) -> Any:
        parameter, values = self._parts.get(id(key), (None, None))
        return values if parameter is not None and parameter() is key else key

    def __getitem__(self, key: Any) -> Any:
        """Return what there is of a parameter or its part, made where there is nothing."""
        return super().__getitem__(self._part(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        """Set what there is."""
        super().__setitem__(self._part(key), value)

    def __delitem__(self, key: Any) -> None:
        """Drop what there is."""
        super().__delitem__(self._part(key))

    def __contains__(self, key: object) -> bool:
        """Return whether there is something."""
        return super().__contains__(self._part(key))

    def get(self, key: Any, default: Any = None) -> Any:
        """Return what there is, or else the default."""
        return super().get(self._part(key), default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Drop and return what there is, or else the default."""
        return super().pop(self._part(key), *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return what there is, set to the default where there is nothing."""
        return super().setdefault(self._part(key), default)

    def update(self, *others: Any, **more: Any) -> None:
        """Set what others have."""
        for key, value in dict(*others, **more).items():
            self[key] = value

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes a usual optimizer's state, in a copy or a file."""
        return defaultdict, (dict,), None, None, iter(self.items())


def adopt(optimizer: torch.optim.Optimizer, trained_parameters: Mapping[int, TrainedParameter]) -> None:
    """Replace parameters in an optimizer's groups by their parts, and cut what state there is of them.

    Args:
        optimizer: One that may have been given more of them, by ``add_param_group``.
        trained_parameters: By the ids of parameters.
    """
    for group in optimizer.param_groups:
        for place, parameter in enumerate(group["params"]):
            trained = trained_parameters.get(id(parameter))
            if trained is None or trained.part.values is parameter:
                continue
            part = trained.part
            group["params"][place] = part.values
            state = dict.pop(optimizer.state, parameter, None)  # no part's that it is found by
            if state is not None:
                optimizer.state[part.values] = {slot: slice_state(slot, value, part) for slot, value in state.items()}
    _find_by_parameters(optimizer, trained_parameters)


def _find_by_parameters(optimizer: torch.optim.Optimizer, trained_parameters: Mapping[int, TrainedParameter]) -> None:
    """Have state be found by parameters, unless it is already; a state dict that was loaded brought other state."""
    state, first = optimizer.state, next(_spread(trained_parameters), None)
    if first is None or (isinstance(state, StateOfParts) and state.finds(first.parameter)):
        return
    if not isinstance(state, StateOfParts):
        optimizer.state = state = StateOfParts(state)
    state.note(_spread(trained_parameters))


def cut_state(optimizer: torch.optim.Optimizer, trained_parameters: Mapping[int, TrainedParameter]) -> None:
    """Cut whole tensors that the user has put into the state of parts: a kernel would step by what comes first."""
    for each in _spread(trained_parameters):
        slots: dict[str, Any] = optimizer.state.get(each.part.values, {})
        for slot, value in slots.items() if isinstance(slots, dict) else ():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != each.part.values.shape:
                slots[slot] = slice_state(slot, value, each.part)


def _spread(trained_parameters: Mapping[int, TrainedParameter]) -> Iterator[TrainedParameter]:
    return (each for each in trained_parameters.values() if each.part.values is not each.parameter)


def slice_state(slot: str, value: Any, part: FlatPart) -> Any:
    """Slice a value of optimizer state to a part; what has not the parameter's shape is left alone."""
    is_count = slot in COUNTERS and not part.shape
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != part.shape or is_count:
        return value
    run = value.detach().reshape(-1)[part.start : part.start + part.values.numel()]
    return run.to(part.values.device, part.values.dtype if run.is_floating_point() else run.dtype, copy=True)
