"""Mismatches between foreign weights and the live tensors they are to fill, listed before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from shard_core.checkpoint.interop.casting import has_less_range, overflows, same_bits
from shard_core.checkpoint.interop.weights import Layout, Reader, Weights, dtype_name
from shard_core.errors import CheckpointError, InvalidOption, nearest

if TYPE_CHECKING:
    from shard_core.checkpoint.state.shard import TensorShard

#: From a name in the files to the name in the module; None drops the tensor.
Names = Mapping[str, str | None] | Callable[[str], str | None]

_HINTS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Findings:
    """What one rank found.

    Attributes:
        mismatches: What does not fit, a sentence each.
        unfit: The live tensors that cannot be filled.
    """

    mismatches: tuple[str, ...]
    unfit: frozenset[str]

    def to_plain(self) -> tuple[list[str], list[str]]:
        """Return the findings as values that can be sent to other ranks."""
        return list(self.mismatches), sorted(self.unfit)

    @classmethod
    def from_plain(cls, mismatches: list[str], unfit: list[str]) -> Findings:
        """Return the findings whose ``to_plain`` another rank has sent."""
        return cls(mismatches=tuple(mismatches), unfit=frozenset(unfit))

    @classmethod
    def joint(cls, findings: Sequence[Findings]) -> Findings:
        """Join what all ranks have found, so that each leaves the same tensors as they were."""
        mismatches = (mismatch for each in findings for mismatch in each.mismatches)
        return cls(
            mismatches=tuple(dict.fromkeys(mismatches)),
            unfit=frozenset().union(*(each.unfit for each in findings)),
        )


class WeightsMatcher:
    """Finds what fills each live tensor, or notes why nothing does.

    Args:
        weights: The files.
        shards: The boxes of the module's tensors on this rank, by the module's own names.
        aliases: The further names of tied tensors.
        names: How the files' names become the module's; None if they are the same.
        cast: Whether floating-point tensors may change their dtype.

    Attributes:
        sources: The stored tensors that stand for each live one; if there are several, they hold the same.
    """

    def __init__(
        self,
        weights: Weights,
        shards: Mapping[str, Sequence[TensorShard]],
        aliases: Mapping[str, str],
        *,
        names: Names | None,
        cast: bool,
    ) -> None:
        self._weights = weights
        self._shards = shards
        self._aliases = aliases
        self._cast = cast
        self._mismatches: list[str] = []
        self._unfit: set[str] = set()
        self.sources: dict[str, list[str]] = {}
        self._assign(names)
        self._compare_layouts()

    def findings(self, reader: Reader) -> Findings:
        """Check that what fits can be read, and read the elements where it depends on these whether it fits.

        Args:
            reader: The files.

        Raises:
            CheckpointCorrupted: If they are not as described.
        """
        for name, sources in self.sources.items():
            if name not in self._unfit:
                shards = [shard for shard in self._shards[name] if shard.view.numel()]
                for shard in shards:
                    reader.check(sources[0], shard.box)
                for mismatch in self._flaws(name, sources, shards, reader):
                    self._refuse(name, mismatch)
        return Findings(mismatches=tuple(self._mismatches), unfit=frozenset(self._unfit))

    def _assign(self, names: Names | None) -> None:
        """Match each stored tensor to the live one it is for."""
        stored = (*self._weights.tensors, *self._weights.others)
        for name in stored:
            target = renamed(name, names)
            if target is None:
                continue
            live = self._aliases.get(target, target)
            shown = repr(name) if target == name else f"{name!r} (here {target!r})"
            if live not in self._shards:
                self._mismatches.append(f"{shown} is in the files, but not here{self._hint(target, self._shards)}")
            elif name in self._weights.others:
                self._refuse(live, f"{shown} is {self._weights.others[name]} in the files, not a tensor of numbers")
                self.sources.setdefault(live, [])
            else:
                self.sources.setdefault(live, []).append(name)
        for live in self._shards:
            if live not in self.sources and live in stored:
                self._refuse(live, f"{live!r} is not filled: names drops that of the files, or gives it another name")
            elif live not in self.sources:
                self._refuse(live, f"{live!r} is not in the files{self._hint(live, stored)}")
        for name in names if isinstance(names, Mapping) else ():
            if name not in stored:
                self._mismatches.append(f"names has {name!r}, which is not in the files{self._hint(name, stored)}")

    def _compare_layouts(self) -> None:
        for live, sources in self.sources.items():
            shard = self._shards[live][0]
            here = Layout(shard.view.dtype, shard.shape)
            for name in sources:
                flaw = self._layout_flaw(here, self._weights.tensors[name])
                if flaw:
                    self._refuse(live, f"{live!r} has {flaw}{'' if name == live else f' (there {name!r})'}")

    def _layout_flaw(self, here: Layout, there: Layout) -> str | None:
        if here.shape != there.shape:
            return f"shape {here.shape} here, {there.shape} in the files"
        convertible = here.dtype.is_floating_point and there.dtype.is_floating_point
        if here.dtype == there.dtype or (convertible and self._cast):
            return None
        advice = "; cast=True converts it" if convertible else ""
        return f"dtype {dtype_name(here.dtype)} here, {dtype_name(there.dtype)} in the files{advice}"

    def _flaws(self, live: str, sources: Sequence[str], shards: Sequence[TensorShard], reader: Reader) -> Iterator[str]:
        dtype = self._shards[live][0].view.dtype
        first, *others = sources
        for other in others:
            if not all(_same(first, other, shard, reader) for shard in shards):
                yield f"{first!r} and {other!r} are both {live!r} here, but differ in the files"
        less = has_less_range(dtype, self._weights.tensors[first].dtype)
        if less and any(overflows(piece, dtype) for shard in shards for _, piece in reader.read(first, shard.box)):
            yield f"{live!r} has numbers in the files that are too large for {dtype_name(dtype)}"

    def _refuse(self, live: str, mismatch: str) -> None:
        self._unfit.add(live)
        self._mismatches.append(mismatch)

    def _hint(self, name: str, others: Mapping[str, object] | Sequence[str]) -> str:
        """Return what may have been meant; finding it is slow, and of long lists only the beginning is shown."""
        return nearest(name, others) if len(self._mismatches) < _HINTS else ""


def renamed(name: str, names: Names | None) -> str | None:
    """Return the module's name for a tensor of the files; None if it is dropped.

    Raises:
        InvalidOption: If ``names`` gives anything else.
    """
    if names is None:
        return name
    target = names.get(name, name) if isinstance(names, Mapping) else names(name)
    if target is not None and not isinstance(target, str):
        raise InvalidOption(f"names gives {target!r} for {name!r}; it must give a string, or None to drop the tensor.")
    return target


def _same(first: str, other: str, shard: TensorShard, reader: Reader) -> bool:
    """Return whether two stored tensors would fill a shard alike."""
    for outer, one in reader.read(first, shard.box):
        for inner, another in reader.read(other, outer):
            if not same_bits(one[inner.slices(outer.offsets)], another, shard.view.dtype):
                return False
    return True


@torch.no_grad()
def fill(shard: TensorShard, name: str, reader: Reader) -> None:
    """Copy what a shard needs of a stored tensor into its view.

    Args:
        shard: What to fill.
        name: The stored tensor.
        reader: The files.

    Raises:
        CheckpointError: If it is less than the whole view.
    """
    filled = 0
    for box, stored in reader.read(name, shard.box) if shard.view.numel() else ():
        shard.view[box.slices(shard.offsets)].copy_(stored)
        filled += box.volume
    if filled != shard.view.numel():
        raise CheckpointError(
            f"{name!r}: {filled} of {shard.view.numel()} elements were found; the files are incomplete."
        )
