"""Saving and loading checkpoints, and weights that other libraries have written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shard_core.checkpoint.all_ranks import on_all_ranks
from shard_core.checkpoint.checks import check_filter, check_flag, check_storage_options
from shard_core.checkpoint.interface import SaveHandle
from shard_core.checkpoint.interop.load_weights import load_weights
from shard_core.checkpoint.keys import FROZEN_KEY, OWN_KEYS, RANDOM_KEY
from shard_core.checkpoint.state.app_state import AppState
from shard_core.checkpoint.state.filtered import TrainedState
from shard_core.checkpoint.storage.opening import absolute, check_path
from shard_core.errors import CheckpointError, CollectiveError, InvalidOption
from shard_core.optim.alike_groups import numbers_of, warn_if_different
from shard_core.strategy.random_state import (
    check_random_state,
    joint_random_state,
    keep_generator,
    own_random_state,
    set_random_state,
)
from shard_core.strategy.state_dict import StrategyStateDict

if TYPE_CHECKING:
    from shard_core.checkpoint.interface import BegunSave, LoadedCheckpoint
    from shard_core.checkpoint.interop.mismatch import Names
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.optim.alike_groups import Numbers
    from shard_core.strategy.random_state import RankState

T = TypeVar("T")
S = TypeVar("S")

#: Under which key a checkpoint keeps the state of the precision: the gradient scaler's.
PRECISION_KEY = f"{OWN_KEYS}precision"


class StrategyCheckpointing(StrategyStateDict):
    """Writes and reads checkpoints that every strategy and world size reads."""

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        *,
        storage_options: Mapping[str, Any] | None = None,
        filter: Callable[[str], bool] | None = None,
        frozen: bool = True,
        state_dict_type: str | None = None,
        blocking: bool | None = None,
    ) -> SaveHandle:
        """Write a checkpoint; every rank calls this.

        With ``blocking=False`` training goes on while it is written. One save is under way at a time: what comes next
        to checkpoints waits for it, and so does ``teardown``; ``optimizer_step`` waits until the tensors are copied. If
        it fails, whichever of these comes next raises that, on every rank, unless the handle has.

        Args:
            path: A folder to be made, or a URL such as ``s3://bucket/run/step-100``; a checkpoint that exists is
                replaced only when the new one is complete.
            state: Modules, optimizers, anything with ``state_dict`` and ``load_state_dict``, and JSON
                values, by keys of your choice.
            storage_options: For the store a URL names, as fsspec takes them.
            filter: Returns for a key, such as ``model.head.weight``, whether the tensor is written.
            frozen: Whether parameters are written that nothing has trained since setup and no checkpoint has filled,
                such as the model that adapters stand in. Without them one loads strictly where they are there already.
            state_dict_type: ``"sharded"`` (the default, unless an option of the strategy sets another) or ``"full"``.
            blocking: Whether to return only when the checkpoint is complete; None leaves it to ``checkpoint_io``,
                whose default blocks.

        Returns:
            A handle to wait on: on every rank, or on none.

        Raises:
            CheckpointError: If it cannot be written, or the save before it could not; one that existed is still there.
            MissingRank: If a rank does not come within ``guard_timeout``.
        """
        self._saves.settle()
        self.barrier(f"save_checkpoint of {path}")

        begun: BegunSave | None = None

        def form() -> str | None:
            return state_dict_type or self.engine_checkpoint_form()

        def collect() -> tuple[TrainingState, dict[str, Any]]:
            check_filter(filter)
            check_flag("frozen", frozen)
            check_flag("blocking", blocking, or_none=True)
            check_storage_options(storage_options)
            contents = self._contents(state)
            values = contents.values()
            described = self.engine_state(contents.modules, contents.optimizers)
            left_out = [] if frozen else self._registry.untrained_keys(contents.modules)
            if left_out:  # else the checkpoint is like any other
                values[FROZEN_KEY] = left_out
            return described, values

        def announce() -> tuple[RankState, Any, Numbers]:
            nonlocal begun
            random = self._random_state()
            begun = self.checkpoint_io.begin_save(
                path,
                coordinator=self.collectives,
                storage_options=storage_options,
                state_dict_type=form(),
                blocking=blocking,
            )
            return random, None if begun is None else begun.announcement, numbers_of(self._contents(state).optimizers)

        try:
            (tensors, values), answers = self._prepared("saving", path, collect, announce)
            tensors.exchange(self.collectives)
        except CollectiveError:
            raise
        except Exception:  # of an engine's own state, too
            if begun is not None:
                begun.abandon()
            raise
        if FROZEN_KEY in values:
            tensors = TrainedState(tensors, values[FROZEN_KEY])
        values[RANDOM_KEY] = joint_random_state([random for random, _, _ in answers])
        announcements = [each for _, each, _ in answers]
        if self.is_global_zero:
            warn_if_different([numbers for _, _, numbers in answers])
        if begun is not None and None in announcements:  # not on every rank: save() raises that
            begun.abandon()
            begun = None
        information = {
            "strategy": self.info.name,
            "precision": self.precision.policy.name,
            "options": str(self.config),
        }

        def save() -> SaveHandle:
            if begun is not None:
                return begun.save(announcements, tensors, values, information=information, filter=filter)
            stays = blocking is not False or self.checkpoint_io.has_joint_outcome  # our own note where they began
            handle = self.checkpoint_io.save(
                path if stays else absolute(path),
                tensors,
                values,
                coordinator=self.collectives,
                information=information,
                storage_options=storage_options,
                filter=filter,
                state_dict_type=form(),
                blocking=blocking,
            )
            if not isinstance(handle, SaveHandle):
                raise CheckpointError(
                    f"{type(self.checkpoint_io).__name__}.save returned {handle!r}; let it return a SaveHandle, such "
                    "as SaveHandle.finished(path)."
                )
            return handle

        with keep_generator(self):
            handle = self._joint("saving", path, save)
        return self._saves.watch(handle, self.collectives, is_joint=self.checkpoint_io.has_joint_outcome)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> dict[str, Any]:
        """Read a checkpoint that any strategy wrote at any world size; every rank calls this.

        Args:
            path: The folder, or its URL.
            state: What to restore: modules, optimizers and stateful objects are filled in place, plain
                values are replaced in the dict. None restores nothing and returns all values. With an
                optimizer among them the run goes on, and so do the random number generators.
            storage_options: For the store a URL names.
            strict: Whether anything that differs or lacks is an error, before anything was touched. Stateful objects
                get theirs before any tensor does; if one refuses it, all get back what their ``state_dict`` returned
                before, and modules and optimizers stay as they are.
            cast: Whether floating-point tensors may be brought to the dtypes they have here: in ``"bf16-true"`` some
                strategies step float32 copies, which are what is saved.

        Returns:
            What was in the checkpoint and not asked for: values, and None for each module and optimizer.

        Raises:
            CheckpointNotFound: If the path holds no committed checkpoint.
            CheckpointMismatch: Listing every difference.
            CheckpointCorrupted: Naming the damaged tensors.
        """
        self._saves.settle()
        self.barrier(f"load_checkpoint of {path}")

        def collect() -> AppState:
            check_flag("strict", strict)
            check_flag("cast", cast)
            check_storage_options(storage_options)
            return self._contents({} if state is None else state)

        contents, data_ranks = self._prepared("loading", path, collect, lambda: self.distributed_sampler_kwargs["rank"])
        # Only now: a data loader's state is a collective of all ranks, and one of them may have raised above.
        contents.back_up()
        tensors = contents.modules or contents.optimizers
        asked = self._exchanged_state(contents.modules, contents.optimizers) if tensors else None
        # Checked with all else: a value found lacking after the tensors were filled would come too late.
        values = contents.value_names - {PRECISION_KEY}

        taken = False

        def take_values(found: Mapping[str, Any]) -> None:
            nonlocal taken
            if contents.optimizers and RANDOM_KEY in found:
                check_random_state(found[RANDOM_KEY], self.global_rank, self.root_device, self.engine_random_state())
            contents.restore(found)
            taken = True

        def load() -> LoadedCheckpoint:
            return self.checkpoint_io.load(
                path,
                asked,
                coordinator=self.collectives,
                storage_options=storage_options,
                strict=strict,
                values=values,
                take_values=take_values,
                **({"cast": True} if cast else {}),  # a CheckpointIO may be older than it
            )

        try:
            loaded = self._joint("loading", path, load)
            if not taken:  # by a CheckpointIO that returns values when all is filled
                self._on_all_ranks("loading", path, lambda: take_values(loaded.values))
        except BaseException:
            contents.roll_back()
            raise
        if loaded.differences:
            warnings.warn(f"left as they were: {'; '.join(loaded.differences)}.", stacklevel=2)
        random = loaded.values.pop(RANDOM_KEY, None)
        self._registry.note_filled(contents.modules, loaded.values.pop(FROZEN_KEY, ()))
        left = contents.replace(loaded.values, into=state)
        if contents.optimizers and random is not None:
            self._set_random_state(random, data_ranks)
        return {**dict.fromkeys(loaded.remainder), **left}

    def load_weights(
        self,
        path: str | os.PathLike[str],
        module: torch.nn.Module,
        *,
        key: str | None = None,
        names: Names | None = None,
        adapter: str | None = None,
        cast: bool = False,
        strict: bool = True,
        storage_options: Mapping[str, Any] | None = None,
    ) -> tuple[str, ...]:
        """Fill a module with weights that another library has written; every rank calls this.

        The path is a folder of safetensors files as Hugging Face's libraries write it (PEFT's adapters too), a folder
        of ``torch.distributed.checkpoint``, a safetensors file, or a file of ``torch.save``; which it is can be seen.
        Each rank reads what it holds of each tensor, and nothing in the files is executed. A tensor that is tied here
        needs to be there under one of its names only.

        Args:
            path: The file or the folder, by a path or a URL.
            module: What setup returned.
            key: For files that hold state dicts under keys: which, such as ``"model"`` in ``{"model": {...}}``.
            names: The module's name for each of the files' names, as a dict or a function; None for a name drops the
                tensor. Names that a dict does not have stay as they are.
            adapter: Which of the module's adapters a folder that PEFT has written fills; None for the only ones. What
                they stand in stays as it is.
            cast: Whether floating-point tensors may be brought to the module's dtypes.
            strict: Whether anything that differs or lacks is an error, before anything was touched.
            storage_options: For the store a URL names.

        Returns:
            With ``strict=False``, what did not fit and was left as it was, a sentence each.

        Raises:
            CheckpointNotFound: If the path holds no weights.
            CheckpointMismatch: Listing every difference.
            CheckpointCorrupted: If files are damaged, or hold what would have to be executed.
            MissingRank: If a rank does not come within ``guard_timeout``.
        """
        self._saves.settle()
        self.barrier(f"load_weights of {path}")
        known = self._on_all_ranks("loading", path, lambda: self._registry.of(module))
        state = self.engine_state({"model": known.module}, {})
        left = load_weights(
            path,
            state,
            module=known.module,
            coordinator=self.collectives,
            key=key,
            names=names,
            adapter=adapter,
            cast=cast,
            strict=strict,
            storage_options=storage_options,
        )
        if left:
            warnings.warn(f"left as they were: {'; '.join(left)}.", stacklevel=2)
        return left

    def wait_until_staged(self) -> None:
        """Wait until an async save has copied its tensors; change weights by hand, or add to averages, after that."""
        self._saves.wait_until_staged()

    def latest_checkpoint(
        self, folder: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None
    ) -> Path | str | None:
        """Find the newest checkpoint of a run that was completed; every rank calls this.

        Rank 0 alone looks, since ranks may see different things on a shared disk, and broadcasts the path.

        Args:
            folder: What the run's checkpoints are in; one that does not exist yet holds none.
            storage_options: For the store a URL names.

        Returns:
            The path, or the URL, to give to ``load_checkpoint``, the same on every rank; None if there is none.

        Raises:
            MissingRank: If a rank does not come within ``guard_timeout``.
        """
        self._saves.settle()
        self.barrier(f"latest_checkpoint of {folder}")

        def find() -> tuple[str, bool] | None:
            check_path(folder)
            check_storage_options(storage_options)
            if not self.is_global_zero:
                return None
            found = self.checkpoint_io.latest(folder, storage_options=storage_options)
            return None if found is None else (str(found), isinstance(found, Path))

        found = on_all_ranks(self.collectives, f"looking for checkpoints in {str(folder)!r}", find)[0]
        return None if found is None else Path(found[0]) if found[1] else found[0]

    def _random_state(self) -> RankState:
        return own_random_state(self.root_device, self.distributed_sampler_kwargs["rank"], self.engine_random_state())

    def _set_random_state(self, random: Mapping[str, Any], data_ranks: Sequence[int]) -> None:
        """Set the random number generators to the states in a checkpoint."""
        seed, state = set_random_state(random, self.global_rank, data_ranks, self.root_device)
        if state is None:
            self.engine_seed(seed)
        else:
            self.engine_set_random_state(state)

    def _on_all_ranks(self, doing: str, path: str | os.PathLike[str], prepare: Callable[[], T]) -> T:
        """Call ``prepare`` on this rank; if it fails on any, all raise that, and none waits for one that gave up."""
        return self._prepared(doing, path, prepare, lambda: None)[0]

    def _prepared(
        self, doing: str, path: str | os.PathLike[str], prepare: Callable[[], T], report: Callable[[], S]
    ) -> tuple[T, list[S]]:
        """Do what ``_on_all_ranks`` does; return also what ``report`` returned afterwards on each rank."""
        prepared: list[T] = []

        def phase() -> S:
            check_path(path)
            prepared.append(prepare())
            return report()

        answers = on_all_ranks(self.collectives, f"{doing} {str(path)!r}", phase)
        return prepared[0], answers

    def _joint(self, doing: str, path: str | os.PathLike[str], call: Callable[[], T]) -> T:
        """Call ``checkpoint_io``; if it may fail on some ranks alone, the others hear of it."""
        return call() if self.checkpoint_io.has_joint_outcome else self._on_all_ranks(doing, path, call)

    def _contents(self, state: Mapping[str, Any]) -> AppState:
        if not isinstance(state, Mapping):
            raise InvalidOption(f"state is of type {type(state).__name__}; it must be a dict, by keys of your choice.")
        for key in state:
            if isinstance(key, str) and key.startswith(OWN_KEYS):
                raise CheckpointError(
                    f"the state has the key {key!r}; keys that begin with {OWN_KEYS!r} are the strategy's own, take "
                    "another."
                )
        unwrapped = {
            key: self.unwrap(value) if isinstance(value, torch.nn.Module) else value for key, value in state.items()
        }
        if self.precision.state_dict():
            unwrapped[PRECISION_KEY] = self.precision
        return AppState(unwrapped)
