"""What a checkpoint remembers of each of its files."""

from __future__ import annotations

import dataclasses

from shard_core.errors import CheckpointCorrupted


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file of a checkpoint.

    Attributes:
        path: Its name in the checkpoint's folder.
        bytes: Its length.
        digest: xxh3 of its header, as 16 hexadecimal digits; the data have digests by block.
    """

    path: str
    bytes: int
    digest: str

    def check_length(self, length: int) -> None:
        """Compare with the length that is found.

        Raises:
            CheckpointCorrupted: If it is another.
        """
        if length != self.bytes:
            raise CheckpointCorrupted(
                f"{self.path!r} has {length} bytes, but {self.bytes} were committed; it was cut short or replaced."
            )
