"""A roll-call over a key-value store, which names the ranks that do not come."""

from __future__ import annotations

import itertools
import os
from datetime import timedelta

import torch.distributed as dist

from shard_core.errors import CollectiveError, MissingRank

#: Numbers this process's connections. Ranks that leave and meet again find the keys of the last time still there.
_connections = itertools.count()


class RollCall:
    """A barrier without the training process group, which names the ranks that do not come.

    Every call costs each rank a few requests to the store, whatever the number of ranks; only when
    somebody is missing are the ranks asked for one by one. Who comes last deletes the keys of the call before, so the
    store holds as many after a year as after two calls.

    Args:
        store: A store all ranks share.
        rank: This process's place.
        world_size: How many ranks there are.
        timeout: How long to wait for the others.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        self._calls = 0
        self._cleared = 0

    def answer(self, name: str) -> None:
        """Report that this rank has come, and wait until all have.

        Args:
            name: What the ranks meet for, for the message.

        Raises:
            MissingRank: Naming the ranks that did not come and where they were last seen.
            CollectiveError: If the ranks met for different things.
        """
        try:
            self._answer(name)
        except dist.DistNetworkError as error:
            raise lost_store(self._rank) from error

    def _answer(self, name: str) -> None:
        self._calls += 1
        call = f"roll-call/{self._calls}"
        self._store.set(f"roll-call/at/{self._rank}", f"{self._calls} {name}")
        first = _text(self._store.compare_set(f"{call}/name", "", name))
        if _call_of(first) != _call_of(name):
            apart = (
                f"rank {self._rank} is in {name!r} where another rank is in {first!r}; every rank must make the same "
                "calls in the same order, so look for one that stands under `if rank == 0`."
            )
            self._store.set(f"{call}/complete", apart)
            raise CollectiveError(apart)
        if self._store.add(f"{call}/count", 1) == self._world_size:
            self._clear()
            self._store.set(f"{call}/complete", "")  # last: who serves the store may leave as soon as it reads this
            return
        try:
            self._store.wait([f"{call}/complete"], self._timeout)
        except dist.DistStoreError as error:
            raise self._absence(name) from error
        apart = _text(self._store.get(f"{call}/complete"))
        if apart:
            raise CollectiveError(apart)
        self._cleared = self._calls - 1

    def _clear(self) -> None:
        """Delete the keys of earlier calls: all ranks have come to this one, so none reads them any more."""
        earlier, self._cleared = range(self._cleared + 1, self._calls), self._calls - 1
        for call in earlier:
            for key in ("name", "count", "complete"):
                self._store.delete_key(f"roll-call/{call}/{key}")

    def _absence(self, name: str) -> CollectiveError:
        seen: dict[int, tuple[int, str]] = {}
        for rank in range(self._world_size):
            key = f"roll-call/at/{rank}"
            if self._store.check([key]):
                calls, _, place = _text(self._store.get(key)).partition(" ")
                seen[rank] = int(calls) if calls.isdecimal() else 0, place
        missing = {rank: seen.get(rank) for rank in range(self._world_size)}
        missing = {rank: last for rank, last in missing.items() if last is None or last[0] < self._calls}
        if not missing:
            return CollectiveError(f"the ranks did not all answer {name!r} in time, but all of them came late.")
        named = ", ".join(
            f"rank {rank} ({'never seen' if last is None else f'last seen at {last[1]!r}'})"
            for rank, last in missing.items()
        )
        return MissingRank(
            f"rank {self._rank} waited {self._timeout.total_seconds():g} s in {name!r} for {named}; every rank "
            "must make this call, so look there for a crash, a hang, or a call under `if rank == 0`."
        )


def _call_of(name: str) -> str:
    """Return what must be the same on every rank: the call, not the path or the module it is about."""
    return name.replace(",", " ").partition(" ")[0]


def lost_store(rank: int) -> MissingRank:
    """Return the error of a rank to which the store does not answer any more."""
    return MissingRank(
        f"rank {rank} lost the store that the ranks meet at; look at rank 0, or at the agent that serves the store, "
        "for a crash."
    )


def _text(value: bytes) -> str:
    """Return what a key holds; whoever else reaches the store can have put anything there."""
    return value.decode(errors="replace")


def shared_store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Connect to the store at ``MASTER_ADDR:MASTER_PORT`` that torchrun, or else rank 0, serves.

    Args:
        rank: This process's place.
        world_size: How many ranks there are.
        timeout: How long to wait for the server.

    Returns:
        A store that only this attempt of the job uses, and this time that its ranks meet; every rank connects
        equally often.

    Raises:
        MissingRank: If nobody serves the store.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = dist.TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0 and not served_by_agent,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise MissingRank(
            f"rank {rank} found nobody at {host}:{port} within {timeout.total_seconds():g} s; rank 0 must run "
            "on the host MASTER_ADDR names, and the port must be open between the hosts."
        ) from error
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"shard/{restarts}/{next(_connections)}", store)
