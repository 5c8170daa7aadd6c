"""Mistakes made while saving and loading."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch

from rogues.rogue import Rogue
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch


class DropsMoments(Rogue):
    """Loads an optimizer without what it kept for each parameter."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        left = self.inner.load_checkpoint(path, state, **more)
        for optimizer in _optimizers(state):
            optimizer.state.clear()
        return left


class ForgetsRandomNumbers(Rogue):
    """Lets random numbers go on as if nothing had been loaded."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        before = torch.get_rng_state()
        left = self.inner.load_checkpoint(path, state, **more)
        torch.set_rng_state(before)
        return left


class GroupsByPosition(Rogue):
    """Gives the first group the settings the first group had, whatever parameters either holds."""

    seen: ClassVar[dict[str, list[list[dict[str, Any]]]]] = {}

    def save_checkpoint(self, path: Any, state: Any, **more: Any) -> Any:
        self.seen[str(path)] = [[_settings(group) for group in each.param_groups] for each in _optimizers(state)]
        return self.inner.save_checkpoint(path, state, **more)

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        left = self.inner.load_checkpoint(path, state, **more)
        for optimizer, groups in zip(_optimizers(state), self.seen.get(str(path), []), strict=False):
            for group, settings in zip(optimizer.param_groups, groups, strict=False):
                group.update(settings)
        return left


class ForgetsEmptyGroups(Rogue):
    """Leaves groups without parameters with the settings that they had."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        groups = [group for each in _optimizers(state) for group in each.param_groups if not group["params"]]
        kept = [_settings(group) for group in groups]
        left = self.inner.load_checkpoint(path, state, **more)
        for group, settings in zip(groups, kept, strict=True):
            group.update(settings)
        return left


class RoundsATensor(Rogue):
    """Lets the first tensor of a module pass through bfloat16."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        left = self.inner.load_checkpoint(path, state, **more)
        for module in [each for each in (state or {}).values() if isinstance(each, torch.nn.Module)]:
            first = next(module.parameters()).data
            first.copy_(first.bfloat16())
        return left


class NeverStrict(Rogue):
    """Leaves out what does not fit, though it was asked to be strict."""

    def load_checkpoint(self, path: Any, state: Any = None, *, strict: bool = True, **more: Any) -> Any:
        return self.inner.load_checkpoint(path, state, strict=False, **more)


class AlwaysStrict(Rogue):
    """Refuses what does not fit, though it was asked not to be strict."""

    def load_checkpoint(self, path: Any, state: Any = None, *, strict: bool = True, **more: Any) -> Any:
        return self.inner.load_checkpoint(path, state, strict=True, **more)


class FillsBeforeRefusing(Rogue):
    """Loads what fits and refuses the checkpoint after that."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        try:
            return self.inner.load_checkpoint(path, state, **more)
        except CheckpointMismatch:
            self.inner.load_checkpoint(path, state, strict=False)
            raise


class IgnoresFilter(Rogue):
    """Saves everything, whatever the filter says."""

    def save_checkpoint(self, path: Any, state: Any, *, filter: Any = None, **more: Any) -> Any:
        return self.inner.save_checkpoint(path, state, **more)


class KeepsValues(Rogue):
    """Leaves plain values in the user's dict as they were."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        return self.inner.load_checkpoint(path, None if state is None else dict(state), **more)


class WholeEverywhere(Rogue):
    """Fills every rank's memory with whole tensors that only rank 0 should have."""

    def module_state_dict(self, module: Any, full: bool = True) -> Any:
        return dict(self.inner.full_parameters(module)) if full else self.inner.module_state_dict(module, full)


class RemovesTheOld(Rogue):
    """Removes the checkpoint it is about to replace."""

    def save_checkpoint(self, path: Any, state: Any, **more: Any) -> Any:
        if self.inner.is_global_zero:
            shutil.rmtree(path, ignore_errors=True)
        return self.inner.save_checkpoint(path, state, **more)


class LoadsDamaged(Rogue):
    """Says nothing of a damaged checkpoint."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        try:
            return self.inner.load_checkpoint(path, state, **more)
        except CheckpointCorrupted:
            return {}


class WritesPickle(Rogue):
    """Leaves a pickle in the checkpoint."""

    def save_checkpoint(self, path: Any, state: Any, **more: Any) -> Any:
        handle = self.inner.save_checkpoint(path, state, **more)
        if more.get("blocking") is False:  # it is not there yet
            return handle
        if self.inner.is_global_zero:
            torch.save({"step": 1}, Path(path) / "extra.pt")
        self.inner.barrier("extra")
        return handle


class Later:
    """A save that is put off until somebody waits for it."""

    def __init__(self, save: Callable[[], Any]) -> None:
        self.wait = save
        self.committed = self

    def done(self) -> bool:
        with suppress(CheckpointError):
            self.wait()
        return True


class SavesLater(Rogue):
    """Looks at what an async save is to hold only when somebody waits for it."""

    def save_checkpoint(self, path: Any, state: Any, *, blocking: bool | None = None, **more: Any) -> Any:
        if blocking is False:
            return Later(lambda: self.inner.save_checkpoint(path, state, **more))
        return self.inner.save_checkpoint(path, state, **more)


class HushesFailures(Rogue):
    """Records a save's failure and raises it nowhere."""

    def save_checkpoint(self, path: Any, state: Any, **more: Any) -> Any:
        handle = self.inner.save_checkpoint(path, state, **more)
        handle.committed.exception()
        return handle


class SkipsAWeight(Rogue):
    """Loads weights of others but for one that it leaves as it was."""

    def load_weights(self, path: Any, module: Any, *, strict: bool = True, **more: Any) -> Any:
        skipped = next(name for name, _ in self.inner.unwrap(module).named_parameters())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            left = self.inner.load_weights(path, module, strict=False, **{"names": {skipped: None}, **more})
        return left if not strict else ()


class OneSizeOnly(Rogue):
    """Refuses modules out of checkpoints of another number of ranks."""

    def load_checkpoint(self, path: Any, state: Any = None, **more: Any) -> Any:
        manifest = Path(path) / "manifest.json"
        tensors = any(isinstance(each, torch.nn.Module) for each in (state or {}).values())
        with suppress(OSError, ValueError):  # what is missing or damaged is for the right strategy to refuse
            if tensors and json.loads(manifest.read_bytes())["world_size"] != self.inner.world_size:
                raise CheckpointError("this checkpoint was saved by another number of ranks.")
        return self.inner.load_checkpoint(path, state, **more)


def _optimizers(state: Any) -> list[torch.optim.Optimizer]:
    return [each for each in (state or {}).values() if isinstance(each, torch.optim.Optimizer)]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
