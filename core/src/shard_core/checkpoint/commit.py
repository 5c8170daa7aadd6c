"""The commit protocol: a save becomes a checkpoint in one step, or leaves what was there as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import xxhash

from shard_core.checkpoint.folder import is_committed
from shard_core.checkpoint.manifest import FILE_NAME, MANIFEST_NAME
from shard_core.checkpoint.storage.record import FileRecord
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.checkpoint.storage.side_by_side import SideBySide

#: What tensors belong to, as their keys and their files begin.
KINDS = ("model", "optim", "state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One try to save, known to all ranks; its files touch no other attempt's.

    Attributes:
        identity: New for every try: a part that an earlier try left behind is never taken for this one's.
        folder: The checkpoint.
        world_size: How many ranks write.
        replaces: Whether a committed checkpoint stands there, whose files must not be touched.
    """

    identity: str
    folder: Folder
    world_size: int
    replaces: bool

    @classmethod
    def begin(cls, folder: Folder, world_size: int) -> Attempt:
        """Make the folder and leave a sign in it for the other ranks; called by rank 0 alone.

        Raises:
            CheckpointError: If the path is taken by something else than a folder.
        """
        if folder.is_file():
            raise CheckpointError(f"{str(folder)!r} is a file; give the path of a folder to keep the checkpoint in.")
        folder.make()
        attempt = cls(
            identity=secrets.token_hex(6), folder=folder, world_size=world_size, replaces=is_committed(folder)
        )
        if world_size > 1:
            try:
                # What rank 0 writes later takes its place, and removes it whatever becomes of the save.
                folder.write(attempt.part_file(0), attempt.identity.encode(), durable=False)
            except BaseException:
                attempt.discard([0])
                raise
        return attempt

    def check_shared(self) -> None:
        """Look for rank 0's sign before anything is written; called by the other ranks.

        Raises:
            CheckpointError: If it is not to be seen from here.
        """
        if not self.folder.holds(self.part_file(0)):
            raise CheckpointError(
                f"this rank does not see what rank 0 writes into {str(self.folder)!r}; give a folder that the hosts of "
                "all ranks share, or a URL such as s3://bucket/run."
            )

    def tensor_file(self, kind: str, rank: int) -> str:
        """Name the file for one kind of tensors of one rank.

        Names are plain, as people expect them, unless a committed checkpoint may be using those.
        """
        suffix = f"-{self.identity}" if self.replaces else ""
        return f"{kind}-{rank:05d}-of-{self.world_size:05d}{suffix}.safetensors"

    def single_file(self, kind: Literal["index", "checkpoint"]) -> str:
        """Name a file that rank 0 writes for all."""
        return f"{kind}{f'-{self.identity}' if self.replaces else ''}.safetensors"

    def part_file(self, rank: int) -> str:
        """Name the file in which a rank tells what it wrote."""
        return f"part-{rank:05d}-of-{self.world_size:05d}-{self.identity}.safetensors"

    def write_index(self, raw: bytes, finishing: SideBySide) -> FileRecord:
        """Write the index of chunks.

        Args:
            raw: The index.
            finishing: What brings it to where it outlasts a loss of power.
        """
        name = self.single_file("index")
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(self.folder.create(name, len(raw)))
            file.write(memoryview(raw))
            opened.pop_all()
        finishing.begin(file.complete)
        return FileRecord(path=name, bytes=len(raw), digest=xxhash.xxh3_64_hexdigest(raw))

    def write_manifest(self, raw: bytes) -> Callable[[], None]:
        """Write the manifest where it does not count yet; all other files must have their names by now.

        Returns:
            The step that makes the folder the new checkpoint.
        """
        return self.folder.prepare(MANIFEST_NAME, raw, unfinished=self._new_manifest)

    def publish(self, step: Callable[[], None], kept: set[str]) -> None:
        """Make the folder the new checkpoint, then remove what no longer belongs to it.

        Args:
            step: What ``write_manifest`` returned.
            kept: The files the new manifest names.

        Raises:
            OSError: If the disk refuses; what was there is there, or the new checkpoint is.
        """
        try:
            step()
        except OSError:
            # Only if it surely was not done: some file systems do what they say has failed.
            if self.folder.holds(self._new_manifest):
                self.discard(range(self.world_size))
            raise
        with contextlib.suppress(OSError):
            names = [each.name for each in self.folder.listing()]
            self.folder.discard(name for name in names if name not in kept and _is_ours(name))

    def discard(self, ranks: Iterable[int]) -> None:
        """Remove what ranks wrote in a try that failed before it was published, as far as possible."""
        names: list[str] = []
        for rank in ranks:
            names += [self.part_file(rank), *(self.tensor_file(kind, rank) for kind in KINDS)]
            if rank == 0:
                names += [self._new_manifest, self.single_file("index"), self.single_file("checkpoint")]
        self.folder.discard(names)
        if not self.replaces:
            with contextlib.suppress(OSError):
                self.folder.remove_folder()  # only an empty one goes

    @property
    def _new_manifest(self) -> str:
        return f"{MANIFEST_NAME}-{self.identity}"


def _is_ours(name: str) -> bool:
    return bool(FILE_NAME.fullmatch(name)) or name.startswith(f"{MANIFEST_NAME}-")
