"""Requests to a store: what it refuses becomes one kind of error, and ranges are asked for several at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shard_core.checkpoint.storage.batches import batched
from shard_core.errors import CheckpointCorrupted, StorageError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

#: How much is asked for at once: so much memory is needed.
_BYTES_AT_ONCE = 1 << 27
_OBJECTS_AT_ONCE = 64


class ObjectRange(NamedTuple):
    """Some bytes of one object.

    Attributes:
        key: The object.
        start: The first byte.
        stop: The one after the last.
    """

    key: str
    start: int
    stop: int


@contextlib.contextmanager
def storage_errors(url: str) -> Iterator[None]:
    """Raise every refusal of a store as one kind of error; that something is not there passes as it is.

    Args:
        url: What was asked for, for the message.

    Raises:
        StorageError: If the store refuses or cannot be reached.
    """
    try:
        yield
    except (FileNotFoundError, StorageError):
        raise
    except Exception as error:
        raise StorageError(f"the store of {url!r} did not do what it was asked: {_described(error)}.") from error


def whole_objects(filesystem: AbstractFileSystem, url: str, keys: Sequence[str]) -> Iterator[bytes]:
    """Read objects, several at once, in their order.

    Raises:
        CheckpointCorrupted: If one is not there.
        StorageError: If the store refuses.
    """
    for place in range(0, len(keys), _OBJECTS_AT_ONCE):
        some = list(keys[place : place + _OBJECTS_AT_ONCE])
        yield from _answers(filesystem, url, some, None, None)


def ranges(filesystem: AbstractFileSystem, url: str, wanted: Iterable[ObjectRange]) -> Iterator[bytes]:
    """Read ranges of objects, several at once, in their order.

    Raises:
        CheckpointCorrupted: If an object is not there, or ends before the range does.
        StorageError: If the store refuses.
    """
    for group in batched(wanted, _length, _BYTES_AT_ONCE):
        keys, starts, stops = (list(column) for column in zip(*group, strict=True))
        for each, data in zip(group, _answers(filesystem, url, keys, starts, stops), strict=True):
            if len(data) != _length(each):
                raise CheckpointCorrupted(f"{each.key!r} ends at byte {each.start + len(data)}; it was cut short.")
            yield data


def beginnings(filesystem: AbstractFileSystem, url: str, keys: Sequence[str], most: int) -> Iterator[bytes]:
    """Read the first bytes of objects, several at once; those that are not there are passed over.

    Raises:
        StorageError: If the store refuses.
    """
    for place in range(0, len(keys), _OBJECTS_AT_ONCE):
        some = list(keys[place : place + _OBJECTS_AT_ONCE])
        with storage_errors(url):
            answers: list[Any] = filesystem.cat_ranges(some, 0, most, on_error="return")
        for key, answer in zip(some, answers, strict=True):
            if isinstance(answer, bytes):
                yield answer
            elif not isinstance(answer, FileNotFoundError):
                raise StorageError(f"the store of {url!r} did not give {key!r}: {_described(answer)}.") from answer


def write_condition(filesystem: AbstractFileSystem, info: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the condition, for ``pipe_file``, that an object has not changed since it was looked at.

    Args:
        filesystem: The store.
        info: What it returned of the object; None if there was none.

    Returns:
        Empty where fsspec offers no such condition: it knows of none but S3's, which its client passes on.
    """
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else {*filesystem.protocol}
    if "s3" not in protocols:
        return {}
    return {"IfNoneMatch": "*"} if info is None else {"IfMatch": info["ETag"]}


def _answers(filesystem: AbstractFileSystem, url: str, keys: list[str], starts: Any, stops: Any) -> list[bytes]:
    with storage_errors(url):
        answers: list[Any] = filesystem.cat_ranges(keys, starts, stops, on_error="return")
    for key, answer in zip(keys, answers, strict=True):
        if isinstance(answer, FileNotFoundError):
            raise CheckpointCorrupted(f"{key!r} is not in the store.") from answer
        if isinstance(answer, BaseException):
            raise StorageError(f"the store of {url!r} did not give {key!r}: {_described(answer)}.") from answer
    return answers


def _length(wanted: ObjectRange) -> int:
    return wanted.stop - wanted.start


def _described(error: BaseException) -> str:
    text = str(error).rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
