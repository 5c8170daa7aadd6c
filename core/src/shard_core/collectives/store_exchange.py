"""Side channels: small objects exchanged over a key-value store by background threads, beside training."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch.distributed as dist

from shard_core.collectives.authentication import Authenticator
from shard_core.collectives.messages import pack, unpack
from shard_core.collectives.roll_call import lost_store
from shard_core.collectives.serialization import deserialize, serialize
from shard_core.errors import CollectiveError, MissingRank

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")

_BEATS = 12  # in the time after which a silent rank counts as missing
_SHORTEST_NAP = 0.002
_LONGEST_NAP = 0.1
_REQUESTS_PER_SECOND = 10_000  # of all ranks that wait, so that the store has time for others


class StoreExchange:
    """Keeps the ``Coordinator`` protocol over a store; used as a context, by one thread.

    A rank may take as long as it likes while its process lives: inside the context it gives a sign of life now and
    then. One that gives none is named to all others. Rank 0 collects and hands out; waiting is done by asking
    again, since a store's client serves nobody else while it waits for a key. However long it goes on, it keeps the
    keys of one call, and none once all have left.

    Args:
        store: Keys for this exchange alone, over a connection that training does not use.
        rank: This process's place.
        world_size: How many ranks there are.
        patience: How long a rank may give no sign of life.
        authenticator: Signs and verifies what goes over the store; None signs nothing.
        name: Which exchange of this session it is.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        patience: timedelta,
        *,
        authenticator: Authenticator | None = None,
        name: str = "exchange",
    ) -> None:
        self._store = store
        self._authenticator = authenticator or Authenticator()
        self._name = name
        self._rank = rank
        self._world_size = world_size
        self._patience = patience.total_seconds()
        self._heartbeat = _Heartbeat(lambda: store.add(f"pulse/{rank}", 1), self._patience / _BEATS)
        self._calls = 0

    @property
    def rank(self) -> int:
        """This process's place in the world, from 0."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self._world_size

    def __enter__(self) -> Self:
        try:
            self._heartbeat.start()
        except dist.DistError as error:
            raise lost_store(self._rank) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.stop()
        if not isinstance(error, CollectiveError):
            self._leave()

    def gather_objects(self, value: T) -> list[T]:
        """Return every rank's ``value`` on every rank, in rank order.

        Raises:
            MissingRank: Naming the ranks that gave no sign of life, on every rank that did.
            CollectiveError: If a value cannot be sent, or somebody else has written to the store.
        """
        self._calls += 1
        mine, answer = f"{self._calls}/{self._rank}", f"{self._calls}/all"
        try:
            self._put(mine, pack(value))
            if self._rank == 0:
                collected = self._collected()
                if collected[0] == "gathered" and self._calls > 1:
                    self._store.delete_key(f"{self._calls - 1}/all")  # all have come here, so they have read it
                self._put(answer, serialize(collected))
            signed = self._fetched({0: answer})[0]
            self._store.delete_key(mine)
        except dist.DistError as error:
            raise lost_store(self._rank) from error
        match deserialize(self._authenticator.verify(signed, self._context(answer))):
            case "missing", str(sentence):
                raise MissingRank(sentence)
            case "refused", str(sentence):
                raise CollectiveError(sentence)
            case "gathered", list(messages) if len(messages) == self._world_size:
                return [unpack(memoryview(message)) for message in messages]
        raise CollectiveError("rank 0's answer is none that it gives; let nobody else reach the ranks' store.")

    def broadcast_object(self, value: T, src: int = 0) -> T:
        """Return rank ``src``'s ``value`` on every rank."""
        answers: list[Any] = self.gather_objects(value if self._rank == src else None)
        return answers[src]  # type: ignore[no-any-return]

    def barrier(self, name: str = "barrier") -> None:
        """Wait for every rank."""
        del name
        self.gather_objects(None)

    def any_true(self, flag: bool) -> bool:
        """Return on every rank whether ``flag`` is true on any."""
        return any(self.gather_objects(flag))

    def side_channel(self) -> contextlib.AbstractContextManager[Self]:
        """Return itself: it holds no training up."""
        return contextlib.nullcontext(self)

    def _put(self, key: str, message: bytes) -> None:
        signed = self._authenticator.sign(message, self._context(key))
        self._store.set(key, signed)  # type: ignore[arg-type]  # torch's stubs leave bytes out

    def _context(self, key: str) -> str:
        """Return the context in which the message under a key is signed."""
        return f"{self._name}/{key}"

    def _collected(self) -> tuple[str, Any]:
        """Collect the messages of all ranks, unread, or the error that all shall raise."""
        keys = {rank: f"{self._calls}/{rank}" for rank in range(self._world_size)}
        try:
            arrived = zip(keys.values(), self._fetched(keys), strict=True)
            return "gathered", [bytes(self._authenticator.verify(each, self._context(key))) for key, each in arrived]
        except MissingRank as error:
            return "missing", str(error)
        except CollectiveError as error:
            return "refused", str(error)

    def _fetched(self, keys: Mapping[int, str]) -> list[bytes]:
        """Wait for a key of each of some ranks, as long as they live."""
        longest = max(_LONGEST_NAP, self._world_size / _REQUESTS_PER_SECOND)
        nap = _SHORTEST_NAP
        heard = {rank: (-1, time.monotonic()) for rank in keys}
        looked = time.monotonic()
        while not self._store.check(list(keys.values())):
            time.sleep(nap)
            nap = min(nap * 1.5, longest)
            if time.monotonic() - looked > self._patience / _BEATS:
                looked = time.monotonic()
                self._listen({rank: key for rank, key in keys.items() if not self._store.check([key])}, heard)
        return [self._store.get(key) for key in keys.values()]

    def _listen(self, absent: Mapping[int, str], heard: dict[int, tuple[int, float]]) -> None:
        now = time.monotonic()
        for rank in absent:
            beats = self._store.add(f"pulse/{rank}", 0)
            if beats != heard[rank][0]:
                heard[rank] = beats, now
        silent = [rank for rank in absent if now - heard[rank][1] > self._patience]
        if silent:
            named = ", ".join(f"rank {rank}" for rank in silent)
            raise MissingRank(
                f"rank {self._rank} heard nothing of {named} for {self._patience:g} s in the background; look there "
                "for a crash or a host that is gone."
            )

    def _leave(self) -> None:
        """Delete the keys and leave: rank 0 last, which may serve the store."""
        try:
            self._store.delete_key(f"pulse/{self._rank}")
            left = self._store.add("left", 1)
            deadline = time.monotonic() + self._patience
            while self._rank == 0 and left < self._world_size and time.monotonic() < deadline:
                time.sleep(_SHORTEST_NAP)
                left = self._store.add("left", 0)
            if self._rank == 0:
                for key in ("left", f"{self._calls}/all"):
                    self._store.delete_key(key)
        except dist.DistError:
            return  # all messages have arrived; whoever served the store is gone already


class _Heartbeat:
    """A heartbeat from a thread of its own.

    Args:
        beat: Sends one.
        seconds: How often.
    """

    def __init__(self, beat: Callable[[], object], seconds: float) -> None:
        self._beat = beat
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shard-pulse", daemon=True)

    def start(self) -> None:
        """Send the first before the others may wait for it, and start the thread."""
        self._beat()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._seconds):
            try:
                self._beat()
            except dist.DistError:
                return  # the store is gone; whoever asks it for an answer raises that
