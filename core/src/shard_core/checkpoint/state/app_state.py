"""The app state: what a user passes to ``save_checkpoint``, split by how it is saved."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch


@runtime_checkable
class Stateful(Protocol):
    """An object with a state dict: a scheduler, a data loader, a user's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore the state."""


@runtime_checkable
class KeptAsModule(Protocol):
    """An object whose tensors are laid out and saved as a module's are: averages of weights, say."""

    @property
    def kept_module(self) -> torch.nn.Module:
        """A module that has the tensors."""


class AppState:
    """A user's state dict, split by how each object is saved.

    Args:
        state: Modules, optimizers, stateful objects and plain values by the user's keys.

    Example:
        >>> state = AppState({"model": torch.nn.Linear(1, 1), "step": 3})
        >>> list(state.modules), state.values()
        (['model'], {'step': 3})
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        self.modules: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self._stateful: dict[str, Stateful] = {}
        self._plain: dict[str, Any] = {}
        self._backups: dict[str, Any] = {}
        self._restored: list[str] = []
        for key, value in state.items():
            if isinstance(value, torch.nn.Module):
                self.modules[key] = value
            elif isinstance(value, torch.optim.Optimizer):
                self.optimizers[key] = value
            elif isinstance(value, KeptAsModule):
                self.modules[key] = value.kept_module
            elif isinstance(value, Stateful):
                self._stateful[key] = value
            else:
                self._plain[key] = value

    def values(self) -> dict[str, Any]:
        """Return what is saved besides modules and optimizers: states and plain values."""
        return {**{key: value.state_dict() for key, value in self._stateful.items()}, **self._plain}

    @property
    def value_names(self) -> frozenset[str]:
        """The user's keys of what is saved besides modules and optimizers."""
        return frozenset((*self._stateful, *self._plain))

    def back_up(self) -> None:
        """Copy the state of stateful objects, for ``roll_back``; of one that raises, nothing."""
        for key, value in self._stateful.items():
            with contextlib.suppress(Exception):  # the user's code; a save that needs the state raises
                self._backups[key] = copy.deepcopy(value.state_dict())

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the state of stateful objects.

        Args:
            values: What the checkpoint holds; what it lacks stays as it is.
        """
        for key, value in self._stateful.items():
            if key in values:
                self._restored.append(key)
                value.load_state_dict(values[key])

    def roll_back(self) -> None:
        """Undo ``restore``, as far as the objects' state could be copied and restored."""
        for key in self._restored:
            if key in self._backups:
                with contextlib.suppress(Exception):  # the error that the user must see is the first
                    self._stateful[key].load_state_dict(self._backups[key])
        self._restored.clear()

    def replace(self, values: Mapping[str, Any], into: dict[str, Any] | None) -> dict[str, Any]:
        """Replace plain values in the user's dict.

        Args:
            values: What the checkpoint holds; what it lacks stays as it is.
            into: The user's dict.

        Returns:
            The values nobody asked for.
        """
        for key in self._plain:
            if key in values and into is not None:
                into[key] = values[key]
        return {key: value for key, value in values.items() if key not in self.value_names}
