"""Threads exchange objects over the store while training talks over its group."""

import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.collectives.roll_call import RollCall
from shard_core.collectives.store_exchange import StoreExchange
from shard_core.errors import CollectiveError, MissingRank


def connected(guard: float = 30.0) -> ProcessGroupCollectives:
    collectives = ProcessGroupCollectives(guard_timeout=timedelta(seconds=guard))
    collectives.connect(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu"))
    return collectives


def talks() -> Any:
    with connected().side_channel() as line:
        gathered = line.gather_objects({"rank": line.rank, "tensor": torch.ones(2)})
        sent = line.broadcast_object([line.rank], src=line.world_size - 1)
        line.barrier()
        said = line.any_true(line.rank == 1), line.any_true(False)
        with line.side_channel() as same:
            again = same.gather_objects(line.rank)
        return [each["rank"] for each in gathered], sent, said, again


@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_keeps_the_coordinators_promises(worlds: Any, size: int) -> None:
    ranks = list(range(size))
    assert worlds(size).run(talks) == [(ranks, [size - 1], (size > 1, False), ranks)] * size


def keys_after(rounds: tuple[int, ...], meet: str) -> list[int]:
    """Count the store's keys after some rounds, and after more."""
    collectives = connected()
    store, counts, done = collectives._store, [], 0

    def goes_on(once: Callable[[], object]) -> None:
        nonlocal done
        for wanted in rounds:
            while done < wanted:
                once()
                done += 1
            collectives.gather_objects(None)  # over the group, while nobody uses the store
            counts.append(store.num_keys())
            collectives.gather_objects(None)

    def background() -> None:
        with collectives.side_channel() as line:
            line.gather_objects("x" * 100)
            line.barrier()

    if meet == "within":
        with collectives.side_channel() as line:
            goes_on(lambda: line.gather_objects("x" * 100))
    else:
        goes_on({"barrier": collectives.barrier, "gather": lambda: collectives.gather_objects(1)}.get(meet, background))
    return counts


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("meet", ["barrier", "gather", "side channel", "within"])
def test_the_store_holds_no_more_keys_the_longer_a_run_takes(worlds: Any, meet: str, size: int) -> None:
    for few, many in worlds(size).run(keys_after, (10, 200 if meet in ("barrier", "gather") else 60), meet):
        assert many == few


def refuses_and_goes_on() -> tuple[int, int]:
    collectives = connected()
    counts = []
    for _ in range(2):
        for _ in range(10):
            with pytest.raises(CollectiveError, match="every rank must make the same calls"):
                collectives.barrier(f"call-{collectives.rank}")
            collectives.barrier("after")
        collectives.gather_objects(None)
        counts.append(collectives._store.num_keys())
        collectives.gather_objects(None)
    return counts[0], counts[1]


def test_calls_that_were_refused_leave_no_keys_either(worlds: Any) -> None:
    for few, many in worlds(2).run(refuses_and_goes_on):
        assert few == many


def training_goes_on() -> float:
    """Wait in a thread for a rank that comes late, and meet for training in the meantime."""
    collectives = connected()
    line = collectives.side_channel()
    late = threading.Event()

    def behind() -> None:
        with line as others:
            if others.rank == 1:
                late.wait()
            others.barrier()

    thread = threading.Thread(target=behind)
    thread.start()
    time.sleep(0.2)
    begun = time.monotonic()
    for _ in range(20):
        collectives.barrier()
    took = time.monotonic() - begun
    assert thread.is_alive()
    late.set()
    thread.join()
    return took


def test_training_meets_while_a_thread_waits(worlds: Any) -> None:
    assert max(worlds(2).run(training_goes_on)) < 20.0


def is_slow() -> list[int]:
    with connected(guard=0.6).side_channel() as line:
        if line.rank == 1:
            time.sleep(2.0)
        return line.gather_objects(line.rank)


def test_who_takes_long_but_lives_is_waited_for(worlds: Any) -> None:
    assert worlds(2).run(is_slow) == [[0, 1]] * 2


@pytest.mark.parametrize("absent", [0, 2])
def test_who_gives_no_sign_of_life_is_named_to_all(absent: int) -> None:
    store = dist.HashStore()

    def waits(rank: int) -> str:
        with pytest.raises(MissingRank) as error, StoreExchange(store, rank, 3, timedelta(seconds=0.5)) as line:
            line.gather_objects(rank)
        return str(error.value)

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(waits, {0, 1, 2} - {absent}))
    assert all(
        re.fullmatch(rf"rank \d heard nothing of rank {absent} for 0.5 s in the background; .*", each) for each in said
    )


def test_a_store_that_is_gone_is_told() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    with pytest.raises(MissingRank, match="rank 1 lost the store that the ranks meet at"):  # noqa: SIM117, PT012
        with StoreExchange(client, 1, 2, timedelta(seconds=30)) as line:
            del server
            line.gather_objects(1)


def test_who_is_not_connected_is_told() -> None:
    with pytest.raises(CollectiveError, match="not connected; call setup_environment"):
        ProcessGroupCollectives().side_channel()


@pytest.mark.parametrize("meets", ["roll call", "exchange"])
def test_a_store_that_is_gone_before_a_meeting_begins_is_named(meets: str) -> None:
    server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, 2, is_master=False)
    del server
    line = StoreExchange(store, 1, 2, timedelta(seconds=1))
    begin = line.__enter__ if meets == "exchange" else lambda: RollCall(store, 1, 2, timedelta(seconds=1)).answer("x")
    with pytest.raises(MissingRank, match="rank 1 lost the store that the ranks meet at"):
        begin()
