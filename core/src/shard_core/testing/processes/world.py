"""Worlds of real ranks, started once and sent functions, so that a distributed test costs milliseconds."""

from __future__ import annotations

import io
import pickle
import sys
import time
import types
from collections.abc import Mapping
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, Self

from shard_core.errors import LaunchError, RankFailed
from shard_core.testing.processes.fork_server import fork_server
from shard_core.testing.processes.rank_process import RankProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import TCPStore

    from shard_core.testing.processes.rank import Reply

_START_SECONDS = 120.0
_GRACE_SECONDS = 2.0
"""How long the other ranks may take once one has failed: they usually wait for it in vain."""
_CHECK_SECONDS = 5.0
_NOTHING: Mapping[str, str] = types.MappingProxyType({})


class World:
    """A number of ranks that live on between tests and run the functions they are sent.

    The ranks are processes with a default process group, over gloo or, where each can have a CUDA device, over NCCL for
    tensors on these, and the environment that torchrun would give them. They start at the first ``run``. After a rank
    has hung, died, or left the others out of step, the ranks are replaced and the next ``run`` finds fresh ones.

    Args:
        size: How many ranks.
        environment: Environment variables they are started with, beside this process's.

    Example:
        A world is used as a context, or closed by hand; the fixture ``worlds`` does it for a session::

            with World(2) as world:
                assert world.run(torch.distributed.get_rank) == [0, 1]
    """

    def __init__(self, size: int, environment: Mapping[str, str] = _NOTHING) -> None:
        self.size = size
        self._environment = environment
        self._ranks: list[RankProcess] = []
        self._store: TCPStore | None = None

    def __repr__(self) -> str:
        return f"World({self.size})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call ``function(*args)`` on every rank.

        Each call finds the random number generators freshly seeded and the environment as it was.

        Args:
            function: A function defined at the top of a module that the ranks can import: the parent's
                ``sys.path`` is theirs.
            args: Arguments that can be pickled, the same for every rank.
            timeout: Seconds until a rank that has not returned counts as hung.

        Returns:
            What the ranks returned, in rank order.

        Raises:
            RankFailed: If a rank raised, died or hung; names each and shows its own traceback, the first
                cause first.
            LaunchError: If the function or an argument cannot be pickled.
        """
        request = _pack(function, args)
        if not self._ranks:
            self._start()
        try:
            replies = self._call(request, timeout)
        except BaseException:
            self.close()  # interrupted: answers may still be under way
            raise
        if any(reply is None or reply.error for reply in replies):
            report = _report(function, self._ranks, replies, timeout)
            if None in replies or not self._in_step():
                self.close()
            raise RankFailed(report)
        return [_unpacked(reply.value) for reply in replies if reply]

    def close(self) -> None:
        """Stop the ranks; a later ``run`` starts new ones."""
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._store = None

    def _start(self) -> None:
        from torch.distributed import TCPStore

        # The store stands in the parent, as torchrun's does: no rank that dies takes it away.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.size):
            fork_server(rank, self._environment)  # begun for all before one is waited for: they import side by side
        self._ranks = [RankProcess(rank, self.size, self._store.port, self._environment) for rank in range(self.size)]
        replies = _collect(self._ranks, _START_SECONDS)
        if any(reply is None or reply.error for reply in replies):
            report = _report(self._start, self._ranks, replies, _START_SECONDS)
            self.close()
            raise RankFailed(report)

    def _call(self, request: bytes, timeout: float) -> list[Reply | None]:
        for rank in self._ranks:
            rank.send(request)
        return _collect(self._ranks, timeout)

    def _in_step(self) -> bool:
        """Check whether the ranks can still communicate: after a failure one may owe the others a message."""
        replies = self._call(_pack(_talk, ()), _CHECK_SECONDS)
        return all(reply is not None and not reply.error for reply in replies)


def _pack(function: Callable[..., Any], args: Sequence[Any]) -> bytes:
    try:
        payload = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{_name(function)} cannot be sent to the ranks ({error}); define it at the top of a module "
            f"and hand it arguments that can be pickled."
        ) from error
    return pickle.dumps((sys.path, payload))


def _unpacked(value: bytes) -> Any:
    import torch

    return torch.load(io.BytesIO(value), weights_only=False)


def _talk() -> None:
    """Exchange a message over every pair and make a group: both hang if the ranks have lost step."""
    import torch
    import torch.distributed as dist

    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, dist.get_rank())
    group = dist.new_group()
    # In host memory, which gloo carries: a rank that leaves a group early ends it for one that is still joining.
    dist.all_reduce(torch.zeros(1), group=group)
    dist.destroy_process_group(group)


def _collect(ranks: Sequence[RankProcess], timeout: float) -> list[Reply | None]:
    """Wait for an answer from each rank; ``None`` stands for a rank that gave none."""
    replies: dict[int, Reply] = {}
    pending = {rank.connection: rank for rank in ranks}
    deadline = time.monotonic() + timeout
    failed = False
    while pending and time.monotonic() < deadline:
        # Asked before the pipes are read: an answer sent just before dying still counts.
        dead = [connection for connection, rank in pending.items() if rank.exit_code is not None]
        for connection in wait(list(pending), timeout=0.0 if dead else 0.1):
            rank = pending.pop(connection)  # type: ignore[call-overload]
            answer = rank.receive()
            if answer is None:
                dead.append(rank.connection)
            else:
                replies[rank.rank] = pickle.loads(answer)
        for connection in dead:
            pending.pop(connection, None)
        if not failed and (dead or any(reply.error for reply in replies.values())):
            failed = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return [replies.get(rank.rank) for rank in ranks]


def _report(
    function: Callable[..., Any],
    ranks: Sequence[RankProcess],
    replies: Sequence[Reply | None],
    timeout: float,
) -> str:
    """Report which ranks failed and how: first the dead, then who raised, in order of time, then the hung."""
    answers = list(zip(ranks, replies, strict=True))
    raised = sorted(
        ((rank, reply) for rank, reply in answers if reply and reply.error), key=lambda answer: answer[1].at
    )
    silent = [rank for rank, reply in answers if reply is None]
    dead = [rank for rank in silent if rank.exit_code is not None]
    patience = "after the failure above" if dead or raised else f"within {timeout:g} s"
    parts = [f"rank {rank.rank} died with exit code {rank.exit_code}{_printed(rank)}" for rank in dead]
    parts += [f"rank {rank.rank} raised:\n{reply.error.rstrip()}{_printed(rank)}" for rank, reply in raised]
    parts += [
        f"rank {rank.rank} did not return {patience}; it hangs here:\n{rank.stack()}"
        for rank in silent
        if rank not in dead
    ]
    return f"{_name(function)} failed on {len(parts)} of {len(ranks)} ranks.\n\n" + "\n\n".join(parts)


def _printed(rank: RankProcess) -> str:
    text = rank.printed()
    return f"\nIt printed:\n{text}" if text else ""


def _name(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
