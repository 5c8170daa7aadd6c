"""The interface of live state: which boxes of which full tensors stand on this rank, and what they are called."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING

from shard_core.checkpoint.keys import model_key, slot_key
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shard_core.checkpoint.state.optimizer_record import OptimizerRecord
    from shard_core.checkpoint.state.shard import TensorShard
    from shard_core.coordinator import Coordinator


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slot:
    """One tensor of an optimizer's state that a checkpoint holds.

    Attributes:
        module: The user's name for the module.
        name: The parameter's name in it.
        slot: The state's name, e.g. ``"exp_avg"``.
        dtype: Its dtype.
        shape: The full tensor's shape.
        parameter_shape: The parameter's shape in the checkpoint.
    """

    module: str
    name: str
    slot: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    parameter_shape: tuple[int, ...]


class TrainingState(abc.ABC):
    """The modules and optimizers of one save or one load, as boxes of full tensors.

    Keys are those ``KeySpace`` gives. Order of calls, on every rank: first ``exchange``; to save, ``shards``,
    ``aliases`` and ``optimizers``; to load, ``prepare_load``, then ``shards``, ``aliases`` and ``optimizers``, whose
    answers are compared with the checkpoint, and ``check_load``; only when that went well are the shards' views
    filled, and ``finish_load`` comes last. An object serves one save or one load.
    """

    #: Whether the shards' views are copies that training never touches, so that an async save needs no others.
    holds_copies: bool = False

    @property
    @abc.abstractmethod
    def modules(self) -> Sequence[str]:
        """The user's names for the modules."""

    def exchange(self, coordinator: Coordinator) -> None:  # noqa: B027 - most states know all by themselves
        """Exchange what ranks must know of one another to answer for optimizers; every rank calls this.

        Args:
            coordinator: How ranks talk.

        Raises:
            CheckpointError: On every rank, if what they hold does not make up a whole.
        """

    @abc.abstractmethod
    def shards(self) -> list[TensorShard]:
        """List the boxes on this rank: parameters, persistent buffers, optimizer state.

        Every rank lists every full tensor, with an empty view where it holds nothing: what one rank does
        not list counts as missing.
        """

    @abc.abstractmethod
    def aliases(self) -> dict[str, str]:
        """Return the further keys of tied tensors, and the keys their shards have."""

    @abc.abstractmethod
    def optimizers(self) -> dict[str, OptimizerRecord]:
        """Describe the optimizers by the user's names for them; every rank returns the same."""

    @abc.abstractmethod
    def prepare_load(self, slots: Sequence[Slot]) -> None:
        """Create optimizer state that was not created yet, without touching the optimizers.

        Args:
            slots: All the state the checkpoint holds for these modules. What no optimizer here
                could take is left out silently; the load names it.
        """

    def check_load(self, optimizers: Sequence[OptimizerRecord]) -> None:  # noqa: B027 - there may be nothing to check
        """Check, before any tensor is filled, that ``finish_load`` accepts what it will be given.

        Args:
            optimizers: As in ``finish_load``.

        Raises:
            CheckpointCorrupted: If it cannot; nothing was changed.
        """

    @abc.abstractmethod
    def finish_load(self, optimizers: Sequence[OptimizerRecord]) -> None:
        """Restore scalars and hyper-parameters, and push copies to where the engine keeps them.

        A parameter named by a record has afterwards exactly the state the checkpoint holds for it, and the state it has
        here where the record has it among ``left_out``.

        Args:
            optimizers: The checkpoint's records of the optimizers of these modules, with the names the
                modules and parameters have here.
        """


class KeySpace:
    """How tensors of modules and optimizers are called in a checkpoint.

    A single module's user name stays out of the keys, so that it loads under another one.

    Args:
        modules: The user's names for the modules of one checkpoint.

    Raises:
        CheckpointError: If names of several modules have dots, so that keys would be ambiguous.

    Example:
        >>> KeySpace(["model"]).parameter("model", "head.weight")
        'model.head.weight'
        >>> KeySpace(["generator", "critic"]).slot("critic", "head.weight", "exp_avg")
        'optim.critic.head.weight.exp_avg'
    """

    def __init__(self, modules: Sequence[str]) -> None:
        several = len(modules) > 1
        for module in modules:
            if several and "." in module:
                raise CheckpointError(f"the state has several modules, so the key {module!r} cannot have a dot in it.")
        self.prefixes: Mapping[str, str] = {module: f"{module}." if several else "" for module in modules}

    def parameter(self, module: str, name: str) -> str:
        """Return the key of a parameter or a buffer."""
        return model_key(self.prefixes[module] + name)

    def slot(self, module: str, name: str, slot: str) -> str:
        """Return the key of a tensor of optimizer state."""
        return slot_key(self.prefixes[module] + name, slot)
