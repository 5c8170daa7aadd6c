"""The phases of a load on one rank: everything is matched and verified before anything is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.format.dtypes import torch_dtype
from shard_core.checkpoint.format.folder import read_index
from shard_core.checkpoint.format.json_fields import shown
from shard_core.checkpoint.format.manifest import Manifest
from shard_core.checkpoint.format.reader import Read, TensorReader
from shard_core.checkpoint.format.values import decode
from shard_core.checkpoint.interface import LoadedCheckpoint
from shard_core.checkpoint.keys import VALUE, is_slot
from shard_core.checkpoint.load.broadcast_reads import broadcast_reads
from shard_core.checkpoint.load.matching import match_modules, saved_optimizers
from shard_core.checkpoint.load.mismatch import (
    TensorMatcher,
    compare_optimizers,
    listing,
    missing_modules,
    missing_values,
)
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch

if TYPE_CHECKING:
    from shard_core.checkpoint.state.optimizer_record import OptimizerRecord
    from shard_core.checkpoint.state.shard import TensorShard
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.coordinator import Coordinator


class ShardedLoad:
    """Loads a checkpoint into a state, in the order of its methods; every rank calls each.

    Only ``fill`` changes the state.

    Args:
        folder: The checkpoint.
        state: What to fill; None for the values alone.
        strict: Whether mismatches are an error.
        cast: Whether floating-point tensors may change their dtype.
        values: Names of the values that must be there.
        take_values: Called with all values before anything is filled.
    """

    def __init__(
        self,
        folder: Folder,
        state: TrainingState | None,
        *,
        strict: bool,
        cast: bool,
        values: Collection[str],
        take_values: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        self._folder = folder
        self._state = state
        self._strict = strict
        self._cast = cast
        self._asked_values = values
        self._take_values = take_values
        self._planned: list[tuple[TensorShard, list[Read]]] = []
        self._records: list[OptimizerRecord] = []
        self._mismatches: list[str] = []
        self._remainder: list[str] = []

    def prepare(self, raw: bytes) -> None:
        """Compare the checkpoint with the state, and plan what to read.

        Args:
            raw: The manifest.

        Raises:
            CheckpointMismatch: If they do not match and must.
            CheckpointCorrupted: If the manifest or the index is not what was committed.
        """
        self._manifest = Manifest.from_bytes(raw)
        self._index = read_index(self._folder, self._manifest)
        self._reader = TensorReader(self._folder, self._index)
        if self._state is None:
            self._remainder = [*self._manifest.modules, *self._manifest.optimizers]
        else:
            self._match(self._state)
        self._reader.check_disjoint(self._reads())
        self._mismatches += missing_values(self._asked_values, self._manifest)
        if self._mismatches and self._strict:
            raise CheckpointMismatch(
                f"{str(self._folder)!r} and what it should be loaded into differ in {len(self._mismatches)} ways; "
                f"nothing was changed (strict=False loads what fits):\n{listing(self._mismatches)}"
            )

    def broadcast_reads(self, coordinator: Coordinator, doing: str) -> None:
        """Read what several ranks need on one of them and broadcast it; see ``broadcast_reads``."""
        broadcast_reads(self._reader.files, self._reader.ranges(self._reads()), coordinator, doing)

    def verify(self) -> None:
        """Verify the digests of what will be read, read the values, and check that all can be filled.

        Raises:
            CheckpointCorrupted: If the files are not what was committed.
            CheckpointMismatch: If numbers are too large for the dtype they would be cast to.
        """
        self._reader.verify(read for _, reads in self._planned for read in reads)
        for shard, reads in self._planned:
            self._check_range(shard, reads)
        self._values = {key: decode(value, self._stored_value) for key, value in self._manifest.values.items()}
        if self._state is not None:
            self._state.check_load(self._records)
        if self._take_values is not None:
            self._take_values(dict(self._values))
        self._reader.check_unchanged()

    @torch.no_grad()
    def fill(self) -> None:
        """Fill the state.

        Raises:
            CheckpointError: If something that was asked for was not filled, or a file was changed meanwhile.
        """
        try:
            for shard, reads in self._planned:
                self._fill(shard, reads)
            self._reader.check_unchanged()
        except CheckpointCorrupted as error:
            raise CheckpointCorrupted(
                f"{error} A part of it is loaded by now, so modules and optimizers hold neither what they held nor "
                "what was saved; load another checkpoint."
            ) from error
        if self._state is not None:
            self._state.finish_load(self._records)

    def loaded(self) -> LoadedCheckpoint:
        """Describe what was loaded."""
        return LoadedCheckpoint(
            values=self._values,
            information=self._manifest.information,
            remainder=tuple(self._remainder),
            differences=tuple(self._mismatches),
        )

    def _match(self, state: TrainingState) -> None:
        aliases = state.aliases()
        matches = match_modules(self._manifest, state.modules, aliases)
        taken = {match.saved: match for match in matches.values()}
        dtypes = {shard.key: shard.view.dtype for shard in state.shards()} if self._cast else {}
        state.prepare_load([slot for match in matches.values() for slot in match.slots(dtypes)])
        saved = {
            key: taken[record.module].renamed(record)
            for key, record in saved_optimizers(self._manifest).items()
            if record.module in taken
        }
        live = state.optimizers()
        mismatches, loaded = compare_optimizers(
            {key: record for key, record in live.items() if record.module in matches}, saved
        )
        tensors = TensorMatcher(self._manifest, matches, cast=self._cast)
        for shard in state.shards():
            tensors.add(shard)
        tensors.finish(loaded)
        self._mismatches = missing_modules(state.modules, matches, self._manifest) + tensors.mismatches + mismatches
        loaded -= tensors.unfit
        self._records = [_only(record, loaded) for record in saved.values()]
        self._planned = [
            (fit.shard, self._reader.plan(fit.stored, fit.shard.box))
            for fit in tensors.fitting
            if fit.owner in loaded or not is_slot(fit.shard.key)
        ]
        here = {(record.module, name) for record in live.values() for name in record.names}
        self._remainder = [key for key in self._manifest.modules if key not in taken]
        self._remainder += [
            key
            for key in self._manifest.optimizers
            if key not in saved or not any((saved[key].module, name) in here for name in saved[key].names)
        ]

    def _reads(self) -> Iterator[Read]:
        """Yield all that will be read, the user's values included."""
        for tensor in self._manifest.tensors:
            if tensor.key.startswith(VALUE):
                yield from self._reader.plan(tensor.key, Box.whole(tensor.shape))
        for _, reads in self._planned:
            yield from reads

    def _fill(self, shard: TensorShard, reads: Sequence[Read]) -> None:
        filled = 0
        for read in reads:
            self._reader.read_into(shard.view[read.box.slices(shard.offsets)], read)
            filled += read.box.volume
        if filled != shard.view.numel():
            raise CheckpointError(
                f"{shard.key!r}: {filled} of {shard.view.numel()} elements were found; the checkpoint is incomplete."
            )

    def _check_range(self, shard: TensorShard, reads: Sequence[Read]) -> None:
        """Check that finite numbers stay finite where they are cast."""
        dtype = shard.view.dtype
        for read in reads:
            if torch_dtype(self._index.record(read.key).dtype) == dtype:
                return
            for _, piece in self._reader.pieces(read):
                if bool((piece.isfinite() & ~piece.to(dtype).isfinite()).any()):
                    raise CheckpointMismatch(
                        f"{shard.key!r} has numbers in {str(self._folder)!r} that are too large for "
                        f"{str(dtype).removeprefix('torch.')}, to which cast=True brings them; nothing was changed."
                    )

    def _stored_value(self, name: Any) -> torch.Tensor:
        if not isinstance(name, str) or name not in self._index:
            raise CheckpointCorrupted(
                f"the manifest's values name a tensor {shown(name)} that is not in the checkpoint."
            )
        return self._reader.full(name)


def _only(record: OptimizerRecord, loaded: set[tuple[str, str]]) -> OptimizerRecord:
    """Return a record without the parameters whose state does not fit."""
    groups = [
        {**group, "params": [name for name in group["params"] if (record.module, name) in loaded]}
        for group in record.groups
    ]
    return dataclasses.replace(record, groups=groups)
