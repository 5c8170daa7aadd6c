"""Opening a folder by what a user calls it: a path on a disk, or a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar

from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.errors import CheckpointError, InvalidOption, nearest

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

    from shard_core.checkpoint.storage.interface import Folder

T = TypeVar("T", bound="str | os.PathLike[str]")

_BROKEN_URL = re.compile(r"[a-z][a-z0-9+.-]+:/[^/]")


def check_path(path: object) -> None:
    """Check that a path is one.

    Raises:
        InvalidOption: If it is empty, or of a type that names no folder; says what to give instead.
    """
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InvalidOption(
            f"the path is of type {type(path).__name__}; it must be a string or a pathlib.Path, and comes first, "
            "as in save_checkpoint(path, state)."
        )
    if not os.fspath(path):
        raise InvalidOption("the path is empty; give that of a folder, '.' for the one this process is in.")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL.

    Example:
        >>> is_url("s3://bucket/run"), is_url("run/step-100")
        (True, False)
    """
    return "://" in os.fspath(path)


def path_or_url(path: str | os.PathLike[str]) -> Path | str:
    """Return a path as a path, and a URL as it is.

    Example:
        >>> path_or_url("memory://run")
        'memory://run'
    """
    return path if isinstance(path, str) and is_url(path) else Path(path)


def absolute(path: T) -> T | str | Path:
    """Return a path on a disk as one that names the same folder when this process is in another; a URL as it is.

    Example:
        >>> absolute("s3://bucket/run"), absolute("/run/step-100")
        ('s3://bucket/run', '/run/step-100')
    """
    if not isinstance(path, str | Path) or is_url(path) or _BROKEN_URL.match(str(path)) or os.path.isabs(path):
        return path
    try:
        whole = Path.cwd() / path
    except FileNotFoundError:  # the folder was removed: there is nothing to begin in
        return path
    return str(whole) if isinstance(path, str) else whole


def open_folder(
    path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None, *, start: str = ""
) -> Folder:
    """Open a folder, whether it exists or not.

    Args:
        path: A path on a disk, or a URL that fsspec knows: ``s3://bucket/run``, ``gs://...``, ``memory://...``,
            ``file://...``.
        storage_options: For the store a URL names; without them its own configuration serves.
        start: The folder that a relative path begins in; by default the one that this process is in.

    Raises:
        InvalidOption: If the path or the options cannot be used; says what to give instead.
        CheckpointError: If a package for this kind of URL is missing; says which.
    """
    check_path(path)
    text = os.fspath(path)
    if isinstance(path, PurePath) and _BROKEN_URL.match(text):
        raise InvalidOption(f"{text!r} was a URL before pathlib took a slash away; give it as a string.")
    if not is_url(path):
        _refuse(storage_options, text)
        return LocalFolder(Path(start, path))
    _check(text)
    filesystem, key = _filesystem(text, storage_options or {})
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(filesystem, LocalFileSystem):
        _refuse(storage_options, text)
        return LocalFolder(Path(key))
    from shard_core.checkpoint.storage.remote import RemoteFolder

    return RemoteFolder(text.rstrip("/"), filesystem, key.rstrip("/"))


def _refuse(storage_options: Mapping[str, Any] | None, text: str) -> None:
    if storage_options:
        raise InvalidOption(f"storage_options are for URLs of stores, and {text!r} is on a disk; leave them out.")


def _check(url: str) -> None:
    """Refuse what stores' clients would take for something else than a name."""
    protocol, _, place = url.partition("://")
    if "::" in url:
        raise InvalidOption(f"{url!r} is a chain of URLs; give that of the store itself.")
    if re.search(r"[*?\[\]]", place) or {".", ".."} & set(place.split("/")):
        raise InvalidOption(f"{url!r} holds '.', '..' or one of *?[] in its path; give a URL of plain names.")
    if not place.strip("/"):
        raise InvalidOption(f"{url!r} names no folder; give one, such as {protocol}://bucket/run.")


def _filesystem(url: str, options: Mapping[str, Any]) -> tuple[AbstractFileSystem, str]:
    from fsspec import available_protocols, get_filesystem_class
    from fsspec.core import url_to_fs
    from fsspec.registry import known_implementations

    protocol = url.partition("://")[0]
    try:
        get_filesystem_class(protocol)
    except ValueError as error:
        hint = nearest(protocol, available_protocols()) or "."
        raise InvalidOption(f"{url!r} is of a kind that fsspec does not know{hint}") from error
    except ImportError as error:
        package = known_implementations[protocol]["class"].partition(".")[0]
        cure = str(error) if package == "fsspec" else f"pip install {package}"
        raise CheckpointError(f"{url!r} needs a package that is not installed: {cure}.") from error
    try:
        filesystem, key = url_to_fs(url, **options)
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"the storage_options for {url!r} cannot be used: {error}.") from error
    return filesystem, key
