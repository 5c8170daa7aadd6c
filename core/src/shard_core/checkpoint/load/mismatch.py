"""Mismatches between a checkpoint and the live state, all listed before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shard_core.checkpoint.format.dtypes import dtype_code, torch_dtype
from shard_core.checkpoint.keys import OWN_KEYS, is_slot, slot_in
from shard_core.checkpoint.state.optimizer_record import KERNEL_CHOICES, OptimizerRecord
from shard_core.errors import nearest

if TYPE_CHECKING:
    from shard_core.checkpoint.format.manifest import Manifest
    from shard_core.checkpoint.load.matching import ModuleMatch
    from shard_core.checkpoint.state.shard import TensorShard

_LISTED = 20
_MOST_SHOWN = 500


class Fit(NamedTuple):
    """A live shard and the stored tensor that fills it.

    Attributes:
        shard: What to fill.
        stored: The checkpoint's key.
        owner: Its module, and the tensor or the parameter whose state it is.
    """

    shard: TensorShard
    stored: str
    owner: tuple[str, str]


class TensorMatcher:
    """Finds for each live shard the stored tensor that fills it, or notes why there is none.

    Args:
        manifest: The checkpoint.
        matches: Live modules and their counterparts.
        cast: Whether floating-point tensors may change their dtype.

    Attributes:
        fitting: What can be filled.
        mismatches: What does not fit, a sentence each.
        unfit: (module, parameter) that do not fit, or whose optimizer state does not.
    """

    def __init__(self, manifest: Manifest, matches: Mapping[str, ModuleMatch], *, cast: bool) -> None:
        self._manifest = manifest
        self._matches = matches
        self._cast = cast
        self._tensors = {tensor.key: tensor for tensor in manifest.tensors}
        self._claimed: set[str] = set()
        self._noted: set[str] = set()
        self.fitting: list[Fit] = []
        self.mismatches: list[str] = []
        self.unfit: set[tuple[str, str]] = set()

    def add(self, shard: TensorShard) -> None:
        """Match one live shard."""
        match = next((match for match in self._matches.values() if match.owns(shard.key)), None)
        if match is None:
            return  # its module is missing as a whole, which is one mismatch and not one per tensor
        stored = match.stored_key(shard.key)
        optimizer_state = is_slot(shard.key)
        if stored is None:
            # State that was not there at the save is dropped at the load; nothing is missing.
            if not optimizer_state and not match.was_left_out(shard.key):
                hint = self._hint(match, shard.key)
                self._note(match, shard, f"is not in the checkpoint{hint}")
            return
        self._claimed.add(stored)
        tensor = self._tensors[stored]
        dtype = dtype_code(shard.view.dtype, shard.key)
        owner = (match.live, match.parameter_of(shard.key))
        convertible = shard.view.is_floating_point() and torch_dtype(tensor.dtype).is_floating_point
        if shard.shape == tensor.shape and (dtype == tensor.dtype or (convertible and self._cast)):
            self.fitting.append(Fit(shard, stored, owner))
            return
        if shard.shape != tensor.shape:
            self._note(match, shard, f"has shape {shard.shape} here, {tensor.shape} in the checkpoint")
        else:
            advice = "; cast=True converts it" if convertible else ""
            self._note(match, shard, f"has dtype {dtype} here, {tensor.dtype} in the checkpoint{advice}")
        self.unfit.add(owner)

    def _note(self, match: ModuleMatch, shard: TensorShard, mismatch: str) -> None:
        """Record a mismatch of a tensor, once however many boxes of it are here."""
        if shard.key not in self._noted:
            self._noted.add(shard.key)
            self.mismatches.append(f"{match.called(shard.key)} {mismatch}")

    def _hint(self, match: ModuleMatch, key: str) -> str:
        """Return what may have been meant; finding it is slow, and of long lists only the beginning is shown."""
        if len(self.mismatches) >= _LISTED:
            return ""
        saved = [each.removeprefix(match.saved_model) for each in self._tensors if each.startswith(match.saved_model)]
        return nearest(f"{match.live}.{match.parameter_of(key)}", [f"{match.live}.{name}" for name in saved])

    def finish(self, loaded: set[tuple[str, str]]) -> None:
        """List what the checkpoint holds and nothing here asked for.

        Args:
            loaded: The (module, parameter) whose optimizer state is asked for.
        """
        refused: set[tuple[str, str]] = set()
        for match in self._matches.values():
            for key in self._tensors:
                if key in self._claimed:
                    continue
                if key.startswith(match.saved_model):
                    tie = match.tied_here(key)
                    reason = f"is tied to {tie!r} here, but kept apart" if tie else "is not here, but"
                    self.mismatches.append(f"{match.called(key, live=False)} {reason} in the checkpoint")
                elif key.startswith(match.saved_optim):
                    name, _ = slot_in(key, match.saved_optim)
                    takers = {(match.live, taker) for taker in match.live_names(name)} & loaded - self.unfit
                    if takers:
                        called = match.called(key, live=False)
                        self.mismatches.append(f"{called} is in the checkpoint, but no optimizer here can take it")
                    refused |= takers
        self.unfit |= refused


def compare_optimizers(
    live: Mapping[str, OptimizerRecord], saved: Mapping[str, OptimizerRecord]
) -> tuple[list[str], set[tuple[str, str]]]:
    """Compare optimizers parameter by parameter; how parameters are divided into groups may differ.

    Args:
        live: The optimizers here.
        saved: Those of the checkpoint, with live names.

    Returns:
        The mismatches, a sentence each, and the (module, parameter) whose state is to be loaded.
    """
    mismatches: list[str] = []
    fitting: set[tuple[str, str]] = set()
    owners = {
        (record.module, name): (record, group)
        for record in saved.values()
        for group in record.groups
        for name in group["params"]
    }
    for key, record in live.items():
        for place, group in enumerate(record.groups):
            sources = {name: owners[record.module, name] for name in group["params"] if (record.module, name) in owners}
            absent = [name for name in group["params"] if name not in sources]
            mismatches += [
                f"optimizer {key!r} steps {name!r}, for which the checkpoint has no optimizer" for name in absent
            ]
            flaws = _group_flaws(f"optimizer {key!r} ({record.type}), group {place},", record, sources)
            flaws += _unlike_kinds(f"optimizer {key!r} ({record.type}), group {place},", record, group, sources)
            mismatches += flaws
            if not flaws:
                fitting |= {(record.module, name) for name in sources}
    here = {(record.module, name) for record in live.values() for name in record.names}
    for key, record in saved.items():
        left = [name for name in record.names if (record.module, name) not in here]
        if len(left) < len(record.names):
            mismatches += [
                f"optimizer {key!r} of the checkpoint steps {name!r}, which no optimizer here does" for name in left
            ]
    return mismatches, fitting


def _group_flaws(
    owner: str, live: OptimizerRecord, sources: Mapping[str, tuple[OptimizerRecord, Mapping[str, object]]]
) -> list[str]:
    """Return why one live group cannot have the hyper-parameters of the groups its parameters were in."""
    if not sources:
        return []
    first_name, (record, first) = next(iter(sources.items()))
    # Of the same optimizer, a hyper-parameter the checkpoint lacks is one that a later release added.
    added = [] if record.type == live.type else [hyper for hyper in live.defaults if hyper not in first]
    flaws = [f"{owner} has {hyper!r}, which the checkpoint's {record.type} has not" for hyper in added]
    flaws += [
        f"{owner} has no {hyper!r}, which the checkpoint's {record.type} has"
        for hyper in record.defaults
        if hyper not in live.defaults
    ]
    for name, (_, group) in sources.items():
        unlike = sorted(
            hyper for hyper in {*first, *group} - KERNEL_CHOICES - {"params"} if first.get(hyper) != group.get(hyper)
        )
        if unlike:
            flaws.append(
                f"{owner} holds {first_name!r} and {name!r}, which had unlike {', '.join(unlike)} in the "
                "checkpoint; put them into groups of their own"
            )
            break
    return flaws


def _unlike_kinds(
    owner: str,
    live: OptimizerRecord,
    group: Mapping[str, object],
    sources: Mapping[str, tuple[OptimizerRecord, Mapping[str, object]]],
) -> list[str]:
    """Return which hyper-parameters and scalars of the checkpoint are of a kind that the live group's cannot be."""
    if not sources:
        return []
    _, saved = next(iter(sources.values()))
    pairs = [(hyper, group[hyper], value) for hyper, value in saved.items() if hyper in group]
    pairs = [pair for pair in pairs if pair[0] not in KERNEL_CHOICES | {"params"}]
    pairs += [
        (f"{name}.{slot}", here, source.scalars[name][slot])
        for name, (source, _) in sources.items()
        for slot, here in live.scalars.get(name, {}).items()
        if slot in source.scalars.get(name, {})
    ]
    return [
        f"{owner} has {name!r} of {here!r}, which in the checkpoint is {value!r}"
        for name, here, value in pairs
        if not _could_be(here, value)
    ]


def _could_be(live: Any, saved: Any) -> bool:
    """Return whether a value may become another: a number another number, and so within a tuple."""
    if isinstance(live, tuple | list):
        alike = isinstance(saved, tuple | list) and len(saved) == len(live)
        return alike and all(map(_could_be, live, saved))
    if isinstance(live, torch.Tensor):
        return _is_number(saved)
    if isinstance(live, bool | int | float):
        return saved is None or _is_number(saved)
    return not isinstance(live, str) or saved is None or isinstance(saved, str)


def _is_number(value: Any) -> bool:
    """Return whether a tensor can be filled with a value."""
    return isinstance(value, float | torch.Tensor) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def listing(mismatches: Sequence[str]) -> str:
    """Show mismatches one per line, the first of them if there are very many."""
    shown = (each if len(each) <= _MOST_SHOWN else f"{each[: _MOST_SHOWN - 3]}..." for each in mismatches[:_LISTED])
    lines = [f"- {mismatch}" for mismatch in shown]
    if len(mismatches) > _LISTED:
        lines.append(f"- and {len(mismatches) - _LISTED} more")
    return "\n".join(lines)


def missing_modules(modules: Iterable[str], matches: Mapping[str, ModuleMatch], manifest: Manifest) -> list[str]:
    """Return which live modules the checkpoint does not hold, a sentence each."""
    held = ", ".join(map(repr, manifest.modules)) or "none"
    return [
        f"module {module!r} is not in the checkpoint{nearest(module, manifest.modules)}; it holds: {held}"
        for module in modules
        if module not in matches
    ]


def missing_values(names: Iterable[str], manifest: Manifest) -> list[str]:
    """Return which values that are asked for the checkpoint does not hold, a sentence each."""
    users = sorted(name for name in manifest.values if not name.startswith(OWN_KEYS))
    held = ", ".join(map(repr, users)) or "none"
    return [
        f"the value {name!r} is not in the checkpoint{nearest(name, users)}; it holds: {held}"
        for name in sorted(names)
        if name not in manifest.values
    ]
