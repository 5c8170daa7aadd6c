"""A store that fails at the n-th thing it is asked, for sweeps over all of them."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem


class FailingStore(MemoryFileSystem):
    """Objects in memory, as ``memory://`` keeps them, but each appears only as a whole, as in real stores."""

    protocol = "failing"
    store: ClassVar[dict[str, MemoryFile]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    #: How many requests are served before one fails, and how it fails: before it takes effect, after, or for good.
    left = -1
    mode = "before"
    #: The request that failed.
    failed: tuple[str, str] | None = None
    #: Which bytes of which objects were given out.
    given: ClassVar[list[tuple[str, int | None, int | None]]] = []
    _lock = threading.Lock()

    @classmethod
    def fail_at(cls, request: int, mode: str) -> None:
        """Let the n-th request from now on fail, counted from 0; a negative number lets none fail."""
        cls.left, cls.mode, cls.failed = request, mode, None

    @classmethod
    def serve(cls, request: str, key: str, effect: Any) -> Any:
        """Do what is asked, or fail; one request at a time, as the objects in memory ask for."""
        with cls._lock:
            cls.left -= 1
            fails = cls.left == -1 or (cls.mode == "gone" and cls.failed is not None)
            if fails and cls.failed is None:
                cls.failed = request, key
            if fails and cls.mode == "after":
                effect()
            if fails:
                raise OSError(f"no answer to {request} of {key}")
            return effect()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return super()._strip_protocol(path.removeprefix("failing://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        return _Pending(self, path) if mode == "wb" else super()._open(path, mode, **options)

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        key = self._strip_protocol(path)
        self.serve("put", key, lambda: self.store.__setitem__(key, MemoryFile(self, key, value)))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        found: bytes = self.serve("get", path, lambda: MemoryFileSystem.cat_file(self, path, start, end))
        self.given.append((self._strip_protocol(path), start, end))
        return found

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.serve("info", path, lambda: MemoryFileSystem.info(self, path))
        return found

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self.serve("list", path, lambda: MemoryFileSystem.ls(self, path, detail))

    def rm(self, path: Any, **options: Any) -> None:
        keys = [self._strip_protocol(each) for each in path]
        self.serve("remove", str(keys), lambda: [self.store.pop(key, None) for key in keys])


class _Pending:
    """An object that is being sent."""

    def __init__(self, store: FailingStore, key: str) -> None:
        self._store, self._key, self._parts = store, store._strip_protocol(key), bytearray()

    def write(self, data: bytes) -> None:
        self._store.serve("part", self._key, lambda: self._parts.extend(data))

    def close(self) -> None:
        self._store.serve("complete", self._key, self._appear)

    def discard(self) -> None:
        self._store.serve("abort", self._key, self._parts.clear)

    def _appear(self) -> None:
        self._store.store[self._key] = MemoryFile(self._store, self._key, bytes(self._parts))


fsspec.register_implementation("failing", FailingStore, clobber=True)
