"""Comparing two checkpoints, whatever strategy, world size or form each was written in."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.inspection.compare_values import optimizer_differences, value_differences
from shard_core.checkpoint.inspection.opened import OpenedCheckpoint
from shard_core.checkpoint.keys import RANDOM_TENSORS, is_slot, model_key, name_in, slot_in, slot_key
from shard_core.checkpoint.storage.opening import is_url
from shard_core.errors import CheckpointCorrupted, InvalidOption

if TYPE_CHECKING:
    from shard_core.checkpoint.inspection.compare_elements import ElementDifferences


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing in which two checkpoints differ.

    Attributes:
        kind: ``missing``, ``dtype``, ``shape``, ``elements``, ``damaged``, ``tied``, ``optimizer`` or ``value``.
        name: The tensor, the optimizer or the value.
        problem: What differs, in a few words.
        elements: How far the elements differ, where they could be compared.
    """

    kind: str
    name: str
    problem: str
    elements: ElementDifferences | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of comparing two checkpoints.

    Attributes:
        first: One.
        second: The other.
        tolerance: How much numbers could differ; None if not by a bit.
        tensors: How many tensors were compared.
        bytes: How many bytes these take in the first.
        differences: All that differs.
    """

    first: str
    second: str
    tolerance: float | None
    tensors: int
    bytes: int
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not self.differences


def compare(
    first: str | os.PathLike[str],
    second: str | os.PathLike[str],
    *,
    tolerance: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare what two checkpoints hold: tensors, tied names, optimizers and values, not how or by whom it was written.

    Where the random number generators of the ranks stood is no part of it.

    Args:
        first: A checkpoint, a path or a URL.
        second: Another.
        tolerance: Two numbers are the same if they differ by no more than this, relative to the larger one;
            two tensors, if no elements differ by more than this, relative to the largest magnitude in either.
            None asks for the same bits.
        storage_options: For the stores that URLs among the two name.
        progress: Called with the bytes of the first that were compared so far and in all.

    Raises:
        CheckpointNotFound: If either path is no committed checkpoint.
        CheckpointCorrupted: If the manifest or the index of either is damaged.
        InvalidOption: If the tolerance is negative or no number.
    """
    if tolerance is not None and not tolerance >= 0:
        raise InvalidOption(f"tolerance is {tolerance!r}; it must be a number from 0 up.")
    neither = not (is_url(first) or is_url(second))
    one, other = (
        OpenedCheckpoint(each, storage_options if neither or is_url(each) else None) for each in (first, second)
    )
    pairs, differences = _pairs(one, other)
    total = sum(one.index.record(key).bytes for _, key, _ in pairs)
    done = 0
    for name, key, other_key in pairs:
        difference = _tensor_difference(name, (one, key), (other, other_key), tolerance)
        differences += [difference] if difference else []
        done += one.index.record(key).bytes
        if progress:
            progress(done, total)
    try:
        found = [("optimizer", *each) for each in optimizer_differences(one, other, tolerance)]
        found += [("value", *each) for each in value_differences(one, other, tolerance)]
    except RecursionError as error:
        raise CheckpointCorrupted("a manifest holds values nested too deeply.") from error
    differences += [Difference(kind=kind, name=name, problem=problem) for kind, name, problem in found]
    return Comparison(
        first=str(one.folder),
        second=str(other.folder),
        tolerance=tolerance,
        tensors=len(pairs),
        bytes=total,
        differences=tuple(differences),
    )


def _pairs(one: OpenedCheckpoint, other: OpenedCheckpoint) -> tuple[list[tuple[str, str, str]], list[Difference]]:
    """Pair stored tensors by name, and list those that are in one checkpoint only."""
    here, there = _stored(one), _stored(other)
    pairs: dict[tuple[str, str], str] = {}
    differences = list(_unlike_ties(one, other))
    for name in sorted({*here, *there}):
        key, other_key = here.get(_tied(one, name)), there.get(_tied(other, name))
        if key is not None and other_key is not None:
            pairs.setdefault((key, other_key), name)
        else:
            lacking = "first" if key is None else "second"
            differences.append(Difference(kind="missing", name=name, problem=f"not in the {lacking}"))
    return [(name, *keys) for keys, name in pairs.items()], differences


def _stored(side: OpenedCheckpoint) -> dict[str, str]:
    """Return each tensor's key by the name that does not depend on which of its tied names it is stored under."""
    keys = [tensor.key for tensor in side.manifest.tensors if not tensor.key.startswith(RANDOM_TENSORS)]
    return {_tied(side, key): key for key in keys}


def _tied(side: OpenedCheckpoint, key: str) -> str:
    if not is_slot(key):
        return side.ties[key][0] if key in side.ties else key
    name, slot = slot_in(key)
    group = side.ties.get(model_key(name))
    return slot_key(name_in(group[0]), slot) if group else key


def _unlike_ties(one: OpenedCheckpoint, other: OpenedCheckpoint) -> Iterator[Difference]:
    here, there = set(one.ties.values()), set(other.ties.values())
    for group in sorted(here ^ there):
        names = ", ".join(map(repr, group[1:]))
        side = "first" if group in here else "second"
        yield Difference(kind="tied", name=group[0], problem=f"tied to {names} only in the {side}")


def _tensor_difference(
    name: str, one: tuple[OpenedCheckpoint, str], other: tuple[OpenedCheckpoint, str], tolerance: float | None
) -> Difference | None:
    from shard_core.checkpoint.inspection.compare_elements import element_differences

    here, there = one[0].index.record(one[1]), other[0].index.record(other[1])
    if here.shape != there.shape:
        return Difference(kind="shape", name=name, problem=f"shape {here.shape} against {there.shape}")
    try:
        elements = element_differences(*one, *other)
    except CheckpointCorrupted as error:
        return Difference(kind="damaged", name=name, problem=str(error))
    summary = (
        f"{elements.differing} of {elements.elements} elements differ, by at most {elements.absolute:.3g} "
        f"(relative {elements.relative:.3g})"
        if elements
        else "the numbers are the same"
    )
    if here.dtype != there.dtype:
        problem = f"dtype {here.dtype} against {there.dtype}; {summary}"
        return Difference(kind="dtype", name=name, problem=problem, elements=elements)
    if elements is None or (tolerance is not None and elements.relative <= tolerance):
        return None
    return Difference(kind="elements", name=name, problem=summary, elements=elements)
