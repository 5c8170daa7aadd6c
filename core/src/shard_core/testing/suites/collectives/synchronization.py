"""Ranks synchronize: they broadcast and gather objects, wait for one another, and learn why a call cannot work."""

from __future__ import annotations

import time
import zlib
from datetime import timedelta
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shard_core.errors import CollectiveError, MissingRank
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard_core.testing.strategy_under_test import Ranks, Subject

_GUARD_SECONDS = 3.0
#: When a rank must know of it on a loaded machine: far sooner than the half hour that engines wait themselves.
_LATEST_SECONDS = 43.0


class Synchronization(Suite):
    """Ranks synchronize: they broadcast and gather objects, wait for one another, and learn why a call cannot work."""

    @promise(every_size=False)
    def test_broadcasts_objects(self, ranks: Ranks) -> None:
        """A broadcast hands the source's object to all ranks: tensors, nothing at all, megabytes, or of any class.

        Usual cause:
            The source is always rank 0, the object is put into a buffer of fixed size, or ``broadcast_any`` is left to
            a ``broadcast_object`` that carries plain values alone.
        """
        for rank, answers in enumerate(ranks.run(broadcast_everything)):
            for source, received in answers.items():
                expected = _describe(_things(source))
                assert received == expected, f"rank {rank} got {received} from rank {source}, which sent {expected}"

    @promise(every_size=False)
    def test_gathers_objects(self, ranks: Ranks) -> None:
        """A gather hands all ranks every rank's object, in their order; what is no plain value is refused on all.

        Usual cause:
            Only rank 0 gets the objects, they stand in the order they came in, or strangers' classes are pickled.
        """
        for rank, (gathered, refusal) in enumerate(ranks.run(gather_everything_else)):
            expected = [_describe([*_plain_things(source), source]) for source in range(ranks.size)]
            assert gathered == expected, f"rank {rank} gathered {gathered}, and ranks have {expected}"
            assert "Fraction" in refusal, f"rank {rank}: the last rank's Fraction is not refused by name: {refusal}"

    @promise(every_size=False)
    def test_barrier_waits(self, ranks: Ranks) -> None:
        """No rank leaves a barrier before the last one has come.

        Usual cause:
            The barrier returns at once where the engine has none of its own, or only rank 0 waits.
        """
        for meeting in zip(*ranks.run(meet), strict=True):
            last_came = max(came for came, _ in meeting)
            for rank, (_, left) in enumerate(meeting):
                assert left >= last_came, f"rank {rank} left {last_came - left:.2f} s before the last rank had come"

    @promise(after=("all_reduce_has_its_operations", "reduces_structures", "broadcasts_objects"), every_size=False)
    def test_wrong_operation_is_refused(self, ranks: Ranks) -> None:
        """A reduction, group, source, mean or leaf that cannot be is a CollectiveError on every rank, and none hangs.

        Usual cause:
            An unknown word falls back to a default, or is found out by the engine on one rank while others wait.
        """
        for rank, (answers, still) in enumerate(ranks.run(ask_the_impossible)):
            for what, (words, message) in answers.items():
                assert message, f"rank {rank}: {what} is not refused; raise CollectiveError"
                absent = [word for word in words if word not in message]
                assert not absent, f"rank {rank}: the error about {what} does not name {absent}: {message}"
            assert still == ranks.size, f"rank {rank}: after a refusal the sum of ones is {still}"

    @promise(after=("barrier_waits",), every_size=False)
    def test_missing_rank_is_named(self, ranks: Ranks) -> None:
        """A rank that does not come to a barrier is named by MissingRank within guard_timeout, on all that came.

        Usual cause:
            The barrier is the engine's own, which waits for its long timeout and knows no names.
        """
        missing = ranks.size - 1
        answers = ranks.run(leave_one_out)
        for rank, (message, seconds) in enumerate(answers[:missing]):
            assert message, f"rank {rank} left the barrier without rank {missing}"
            for word in (f"rank {missing}", "epoch end"):
                assert word in message, f"rank {rank}: the error about the absence does not name {word!r}: {message}"
            assert seconds < _LATEST_SECONDS, f"rank {rank} waited {seconds:.1f} s, guard_timeout is 3 s"


def broadcast_everything(subject: Subject) -> dict[int, Any]:
    """Broadcast what the first and the last rank have."""
    with subject.strategy() as strategy:
        sources = (0, strategy.world_size - 1)
        return {src: _describe(strategy.broadcast(_things(strategy.global_rank), src)) for src in sources}


def gather_everything_else(subject: Subject) -> tuple[list[list[Any]], str]:
    """Gather what all ranks have, and then what holds an object of another class on the last."""
    with subject.strategy() as strategy:
        rank = strategy.global_rank
        gathered = [_describe(things) for things in strategy.all_gather_object([*_plain_things(rank), rank])]
        odd = Fraction(1, 3) if rank == strategy.world_size - 1 else 0
        return gathered, _refusal(lambda: strategy.all_gather_object({"odd": odd}))


def meet(subject: Subject) -> list[tuple[float, float]]:
    """Enter a barrier as often as there are ranks, each late once, and return when this one came and left."""
    with subject.strategy() as strategy:
        times = []
        for late in range(strategy.world_size):
            if strategy.global_rank == late:
                time.sleep(0.2)
            came = time.monotonic()
            strategy.barrier(f"meeting {late}")
            times.append((came, time.monotonic()))
        return times


def ask_the_impossible(subject: Subject) -> tuple[dict[str, tuple[tuple[str, ...], str]], float]:
    """Return the error of each impossible request, with the words it must name, and a sum of ones at the end."""
    with subject.strategy() as strategy:
        ones = torch.ones(2, device=strategy.root_device)
        absent = strategy.world_size
        requests: dict[str, tuple[tuple[str, ...], Callable[[], object]]] = {
            "reduce_op='summ'": (("summ", "'sum'"), lambda: strategy.all_reduce(ones, reduce_op="summ")),
            "reduce with reduce_op='avrg'": (("avrg", "mean"), lambda: strategy.reduce(ones, reduce_op="avrg")),
            "group='data_paralel'": (
                ("data_paralel", "'data_parallel'"),
                lambda: strategy.all_reduce(ones, group="data_paralel"),
            ),
            "all_gather with group='everyone'": (("everyone",), lambda: strategy.all_gather(ones, group="everyone")),
            f"src={absent}": ((str(absent),), lambda: strategy.broadcast("x", src=absent)),
            "the mean of integers": (("int64",), lambda: strategy.all_reduce(ones.long())),
            "reduce_op=ReduceOp.BAND": (("BAND",), lambda: strategy.all_reduce(ones, reduce_op=dist.ReduceOp.BAND)),
            "a text among metrics": (("['name']", "str"), lambda: strategy.reduce({"loss": 1.0, "name": "x"})),
        }
        if strategy.world_size > 1:
            given = [1.0] * (1 + strategy.global_rank)
            requests["metrics that differ between ranks"] = (("[1]", "nothing"), lambda: strategy.reduce(given))
        answers = {what: (words, _refusal(request)) for what, (words, request) in requests.items()}
        return answers, strategy.all_reduce(ones, reduce_op="sum")[0].item()


def leave_one_out(subject: Subject) -> tuple[str, float]:
    """Enter a barrier without the last rank, and return the error about its absence and how long that took."""
    with subject.strategy(guard_timeout=timedelta(seconds=_GUARD_SECONDS)) as strategy:
        start = time.monotonic()
        message = ""
        if strategy.global_rank != strategy.world_size - 1:
            try:
                strategy.barrier("epoch end")
            except MissingRank as error:
                message = str(error)
        return message, time.monotonic() - start


def _refusal(request: Callable[[], object]) -> str:
    try:
        request()
    except CollectiveError as error:
        return str(error)
    return ""


def _plain_things(rank: int) -> list[Any]:
    return [None, {"rank": rank, "numbers": torch.full((3,), rank)}, b"", bytes([rank]) * (3 << 20)]


def _things(rank: int) -> list[Any]:
    return [*_plain_things(rank), Fraction(1, rank + 2)]  # none of the values that messages consist of


def _describe(things: list[Any]) -> list[Any]:
    """Summarize what is in a list of things."""
    nothing, record, empty, many, a_users = things
    return [nothing, record["rank"], record["numbers"].tolist(), empty, len(many), zlib.crc32(many), a_users]
