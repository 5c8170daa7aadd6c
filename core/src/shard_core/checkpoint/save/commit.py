"""The commit protocol: a save becomes a checkpoint in one step, or leaves what was there as it was.

Several runs may save into one folder at once, or one beside what another left when it died. Whatever the order of their
steps, the folder holds what it held before or all of one of the saves:

- No two saves write to one file. Names carry the save's identity; the plain ones belong to who was first to claim
  ``index.safetensors`` in a folder without a manifest. The claim is the last file to go, in a save that gives up and
  when a checkpoint is removed, so that nobody has it while another may still touch the others.
- The manifest is replaced in one step, which checks whether what stands is what stood when the save began: if another
  was committed meanwhile, the later one is overtaken and fails. A lock keeps others out between look and step; stores
  that take conditions check them in the request itself. Elsewhere the last one wins: a whole checkpoint, too.
- A save removes its own files and, once it is committed, those that the manifest it replaced names. Nobody else needs
  them: there is one manifest, and it does not name them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal

import xxhash

from shard_core.checkpoint.format.folder import standing_manifest
from shard_core.checkpoint.format.manifest import CLAIM, MANIFEST_NAME, Manifest
from shard_core.checkpoint.keys import KINDS
from shard_core.checkpoint.storage.interface import FileRecord
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointOvertaken

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import Folder
    from shard_core.checkpoint.storage.tasks import Tasks

#: How often a folder is made that others remove as soon as it is empty.
_TRIES = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt to save, known to all ranks; its files touch no other attempt's.

    Attributes:
        identity: New for every attempt: a rank index that an earlier one left is never taken for this one's.
        folder: The checkpoint.
        world_size: How many ranks write.
        plain: Whether its files may have plain names.
        replaces: The manifest that stood there when it began; None for none, and on other ranks than 0.
    """

    identity: str
    folder: Folder
    world_size: int
    plain: bool
    replaces: bytes | None = None

    @classmethod
    def begin(cls, folder: Folder, world_size: int) -> Attempt:
        """Create the folder and write a sign in it for the other ranks; called by rank 0 alone.

        Raises:
            CheckpointError: If the path is taken by something else than a folder.
        """
        if folder.is_file():
            raise CheckpointError(f"{str(folder)!r} is a file; give the path of a folder to keep the checkpoint in.")
        identity = secrets.token_hex(6)
        for left in reversed(range(_TRIES)):
            folder.make()
            standing = standing_manifest(folder)
            attempt = cls(identity=identity, folder=folder, world_size=world_size, plain=False, replaces=standing)
            try:
                if standing is None and folder.claim(CLAIM, attempt._sign):
                    return dataclasses.replace(attempt, plain=True)
                # The index takes its place later; until then it keeps others from removing the folder.
                folder.write(attempt.single_file("index"), attempt._sign, durable=False)
            except FileNotFoundError:  # a save that gave up has removed the folder
                if not left:
                    raise
            except BaseException:
                attempt.discard([0])
                attempt.release()
                raise
            else:
                break
        return attempt

    def check_shared(self) -> None:
        """Check that rank 0's sign is here before anything is written; called by the other ranks.

        Raises:
            CheckpointError: If it is not to be seen from here.
        """
        name = self.single_file("index")
        try:
            seen = self.folder.holds(name) and self.folder.read(name, len(self._sign)) == self._sign
        except CheckpointCorrupted:
            seen = False
        if not seen:
            raise CheckpointError(
                f"this rank does not see what rank 0 writes into {str(self.folder)!r}; give a folder that the hosts of "
                "all ranks share, or a URL such as s3://bucket/run."
            )

    def tensor_file(self, kind: str, rank: int) -> str:
        """Return the name of the file for one kind of tensors of one rank.

        Names are plain, as people expect them, unless another save may be using those.
        """
        return f"{kind}-{rank:05d}-of-{self.world_size:05d}{self._suffix}.safetensors"

    def single_file(self, kind: Literal["index", "checkpoint"]) -> str:
        """Return the name of a file that rank 0 writes for all."""
        return f"{kind}{self._suffix}.safetensors"

    def rank_index_file(self, rank: int) -> str:
        """Return the name of the file that holds a rank's index."""
        return f"part-{rank:05d}-of-{self.world_size:05d}-{self.identity}.safetensors"

    def write_index(self, raw: bytes, finishing: Tasks) -> FileRecord:
        """Write the index of chunks.

        Args:
            raw: The index.
            finishing: The tasks that flush it to the disk.
        """
        name = self.single_file("index")
        if self.plain:
            unfinished = f"index-{self.identity}.safetensors"
            finishing.begin(functools.partial(self.folder.overwrite, name, raw, unfinished=unfinished))
        else:
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
        return self.folder.prepare(
            MANIFEST_NAME, raw, unfinished=self._new_manifest, may_replace=self._check_not_overtaken
        )

    def publish(self, step: Callable[[], None], kept: set[str]) -> None:
        """Publish the folder as the new checkpoint, then remove what no longer belongs to it.

        Args:
            step: What ``write_manifest`` returned.
            kept: The files the new manifest names.

        Raises:
            CheckpointOvertaken: If another save was committed there since this one began.
            OSError: If the disk refuses; what was there is there, or the new checkpoint is.
        """
        ranks = range(self.world_size)
        try:
            step()
        except Exception as error:
            # Only if it surely was not done: some file systems do what they say has failed.
            if not isinstance(error, OSError) or self.folder.holds(self._new_manifest):
                self.discard(ranks)
                self.release()
            raise
        with contextlib.suppress(OSError):
            there = {each.name for each in self.folder.listing()}
            self._remove((self._written_by(ranks) | self._replaced_files()) & there - kept)

    def discard(self, ranks: Iterable[int]) -> None:
        """Remove what ranks wrote in an attempt that failed before it was published, as far as possible."""
        self.folder.discard(sorted(self._written_by(ranks) - {CLAIM}))

    def release(self) -> None:
        """Release the plain names, and the folder if it is empty; called by rank 0 alone, after all have discarded."""
        if self.plain:
            self.folder.discard([CLAIM])
        with contextlib.suppress(OSError):
            self.folder.remove_folder()

    def _check_not_overtaken(self, standing: bytes | None) -> None:
        if standing in (None, self.replaces):
            return
        try:
            other = f"save {Manifest.from_bytes(standing or b'').attempt}"
        except CheckpointCorrupted:
            other = "another save"
        raise CheckpointOvertaken(
            f"save {self.identity} of {str(self.folder)!r} was overtaken: {other} was committed there after this one "
            "had begun, and stays; end the run that saves there too, or save to another path."
        )

    def _written_by(self, ranks: Iterable[int]) -> set[str]:
        names = set()
        for rank in ranks:
            names |= {self.rank_index_file(rank), *(self.tensor_file(kind, rank) for kind in KINDS)}
            if rank == 0:
                names |= {self._new_manifest, self.single_file("index"), self.single_file("checkpoint")}
                names.add(f"index-{self.identity}.safetensors")
        return names

    def _replaced_files(self) -> set[str]:
        try:
            return set(Manifest.from_bytes(self.replaces).names) if self.replaces else set()
        except CheckpointCorrupted:
            return set()  # whose files these are is unknown

    def _remove(self, names: set[str]) -> None:
        self.folder.discard([*sorted(names - {CLAIM}), *(names & {CLAIM})])

    @property
    def _suffix(self) -> str:
        return "" if self.plain else f"-{self.identity}"

    @property
    def _sign(self) -> bytes:
        return self.identity.encode()

    @property
    def _new_manifest(self) -> str:
        return f"{MANIFEST_NAME}-{self.identity}"
