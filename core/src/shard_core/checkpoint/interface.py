"""The interface of checkpoint IO: what saves and loads training state, and what a save and a load return."""

from __future__ import annotations

import abc
import dataclasses
import os
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.storage.opening import path_or_url
from shard_core.errors import MissingCapability

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.coordinator import Coordinator


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SaveHandle:
    """A save under way, or done.

    Attributes:
        path: Where the checkpoint is, once committed: a path, or a URL.
        staged: Done when training may change the tensors again.
        committed: Done when the checkpoint is complete and durable; raises what made it fail.
    """

    path: Path | str
    staged: Future[None]
    committed: Future[None]

    @classmethod
    def finished(cls, path: str | os.PathLike[str]) -> SaveHandle:
        """Return the handle of a save that is complete.

        Example:
            >>> SaveHandle.finished("run/step-100").committed.done()
            True
        """
        done: Future[None] = Future()
        done.set_result(None)
        return cls(path=path_or_url(path), staged=done, committed=done)

    @property
    def was_complete(self) -> bool:
        """Whether ``finished`` made it: the checkpoint was complete when the save returned.

        Example:
            >>> SaveHandle.finished("run/step-100").was_complete
            True
        """
        return self.staged is self.committed

    def wait(self, timeout: float | None = None) -> Path | str:
        """Wait until the checkpoint is complete and return where it is.

        Args:
            timeout: Seconds to wait at most; None for as long as it takes.

        Raises:
            CheckpointError: If the save failed.
            TimeoutError: If it takes longer.
        """
        self.committed.result(timeout)
        return self.path


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedCheckpoint:
    """What a load returns besides the tensors it filled.

    Attributes:
        values: All values that were saved, by the user's names.
        information: What is recorded about the run that saved it.
        remainder: The user's names of modules and optimizers in the checkpoint that were not asked for.
        differences: What did not fit and was left as it was; empty unless ``strict=False``.
    """

    values: dict[str, Any]
    information: Mapping[str, Any]
    remainder: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()


class BegunSave(abc.ABC):
    """A save that each rank has begun before the ranks meet.

    Attributes:
        announcement: What the other ranks must know of it: values that the coordinator can send.
    """

    announcement: Any

    @abc.abstractmethod
    def save(
        self,
        announcements: Sequence[Any],
        state: TrainingState,
        values: Mapping[str, Any],
        *,
        information: Mapping[str, Any],
        filter: Callable[[str], bool] | None = None,
    ) -> SaveHandle:
        """Write the checkpoint; every rank calls this, and it raises what ``CheckpointIO.save`` raises.

        Args:
            announcements: That of each rank, in rank order.
            state: Modules and optimizers.
            values: The rest, by the user's names.
            information: What people may want to know of this run.
            filter: Returns whether a tensor of a module or an optimizer is written, by its key.
        """

    @abc.abstractmethod
    def abandon(self) -> None:
        """Undo what was begun: another rank has failed before it could announce its own."""


class CheckpointIO(abc.ABC):
    """Saves and loads training state; held by every strategy, replaceable by a third party's.

    Every rank calls ``save`` and ``load`` at the same point. They succeed on every rank or raise on
    every rank.
    """

    @property
    def has_joint_outcome(self) -> bool:
        """Whether ``save``, ``load`` and a handle's ``committed`` never fail on some ranks alone.

        Where it is False, which is the default, the strategy lets all ranks meet once more to raise what one raised.
        """
        return False

    @abc.abstractmethod
    def save(
        self,
        path: str | os.PathLike[str],
        state: TrainingState,
        values: Mapping[str, Any],
        *,
        coordinator: Coordinator,
        information: Mapping[str, Any],
        storage_options: Mapping[str, Any] | None = None,
        filter: Callable[[str], bool] | None = None,
        state_dict_type: str | None = None,
        blocking: bool | None = None,
    ) -> SaveHandle:
        """Write a checkpoint.

        Args:
            path: The folder to make or, if it is a checkpoint, to replace; a path or a URL. Where ``blocking`` is
                False, a path is absolute, for the process may go elsewhere, unless the outcome is joint.
            state: Modules and optimizers.
            values: The rest, by the user's names; rank 0's are kept.
            coordinator: How ranks talk.
            information: What people may want to know of this run; JSON values.
            storage_options: For the store a URL names.
            filter: Returns whether a tensor of a module or an optimizer is written, by its key.
            state_dict_type: ``"sharded"`` (the default) or ``"full"``.
            blocking: Whether to return only when the checkpoint is complete; None for what this class does by itself.
                Where it is False, the handle's ``staged`` is done no later than ``committed``, and the process does
                not exit before both are.

        Raises:
            CheckpointError: If it cannot be written; a checkpoint that was there still is.
            MissingCapability: If it cannot save asynchronously and ``blocking`` is False.
        """

    def begin_save(
        self,
        path: str | os.PathLike[str],  # noqa: ARG002 - for those who implement it, as the others
        *,
        coordinator: Coordinator,  # noqa: ARG002
        storage_options: Mapping[str, Any] | None = None,  # noqa: ARG002
        state_dict_type: str | None = None,  # noqa: ARG002
        blocking: bool | None = None,  # noqa: ARG002
    ) -> BegunSave | None:
        """Begin a save on this rank, where the ranks meet anyhow before they save: so they meet once less.

        Called on every rank, and may neither communicate nor need another rank to be called there. Whoever implements
        it has a joint outcome.

        Returns:
            What was begun; None, which is the default, to let ``save`` do all.

        Raises:
            CheckpointError: If nothing can be written there; on this rank alone will do.
        """
        return None

    @abc.abstractmethod
    def load(
        self,
        path: str | os.PathLike[str],
        state: TrainingState | None,
        *,
        coordinator: Coordinator,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = True,
        cast: bool = False,
        values: Collection[str] = (),
        take_values: Callable[[dict[str, Any]], object] | None = None,
    ) -> LoadedCheckpoint:
        """Fill modules and optimizers in place, at any number of ranks, from any number of ranks.

        Args:
            path: The checkpoint, a path or a URL.
            state: Modules and optimizers; None for the values alone.
            coordinator: How ranks talk.
            storage_options: For the store a URL names.
            strict: Whether a mismatch is an error rather than something to leave as it is.
            cast: Whether floating-point tensors may be brought to the dtypes they have here; given only if they may.
            values: The user's names of the values that are asked for; one that is lacking is a mismatch.
            take_values: Called on every rank with all values, once everything else is found to be in order and before
                any tensor is filled. What it raises stops the load there. It may be called again, if the checkpoint
                is replaced while it is read.

        Raises:
            CheckpointNotFound: If there is no committed checkpoint at the path.
            CheckpointMismatch: If checkpoint and state do not match; nothing was changed.
            CheckpointCorrupted: If the files are not what was committed; nothing was changed.
        """

    def latest(
        self,
        folder: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,  # noqa: ARG002 - for those who implement it
    ) -> Path | str | None:
        """Return the newest committed checkpoint in a folder; called on rank 0 alone.

        Args:
            folder: Where a run keeps its checkpoints; one that does not exist yet holds none.
            storage_options: For the store a URL names.

        Returns:
            The checkpoint's path or URL, or None if there is none.

        Raises:
            MissingCapability: If this class does not implement it.
        """
        raise MissingCapability(
            f"{type(self).__name__} cannot tell which checkpoint in {os.fspath(folder)!r} is the newest; give "
            "load_checkpoint the path of one, or let the class implement latest()."
        )
