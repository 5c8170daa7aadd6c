"""What a rank is told when another is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from shard_core import get_strategy
from shard_core.coordinator import SECRET_VARIABLE
from shard_core.errors import CollectiveError

_LEFT = """\
import os, sys

import torch

from shard_core import get_strategy
from shard_core.errors import CollectiveError

with get_strategy("ddp", accelerator="cpu") as strategy:
    strategy.barrier()  # both are there
    if strategy.global_rank == 1:
        os._exit(0)
    try:
        strategy.{call}
    except CollectiveError as error:
        sys.stdout.write(f"{{error}}\\n")
        sys.stdout.flush()
    os._exit(0)  # to leave in order takes both ranks
"""


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("all_reduce(torch.ones(1))", "rank 0 waited in a reduction in vain: "),
        ("all_gather(torch.ones(1))", "rank 0 waited in a gather in vain: "),
        ("collectives.gather_objects(1)", "rank 0 waited in an exchange in vain: "),
    ],
)
def test_a_rank_that_has_died_is_told_of_in_a_sentence(tmp_path, call, sentence):
    script = tmp_path / "left.py"
    script.write_text(_LEFT.format(call=call))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert sentence in done.stdout, done.stderr
    assert "a rank that has died or left tells why in its own output" in done.stdout


class Point(NamedTuple):
    """What a user may send."""

    x: int


def broadcasts(secret: str | None) -> tuple[list[Any], str, list[int]]:
    """Let the last rank send objects of all kinds, then one that cannot be sent."""
    if secret is not None:
        os.environ[SECRET_VARIABLE] = secret
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    with get_strategy("ddp", accelerator="cpu") as strategy:
        objects = [Point(rank), {rank}, {"rank": (rank, torch.full((2, 2), rank).t())}, None, b"", bytes(3 << 20)]
        received = [strategy.broadcast(each, src=last) for each in objects]
        try:
            strategy.broadcast((lambda: None) if rank == last else None, src=last)
            said = ""
        except CollectiveError as error:
            said = str(error)
        return received, said, strategy.collectives.gather_objects(rank)


@pytest.mark.parametrize("secret", [None, "a secret of sixteen or more"])
def test_users_objects_reach_every_rank_as_what_they_were(worlds: Any, secret: str | None) -> None:
    for received, said, ranks in worlds(2).run(broadcasts, secret):
        point, numbers, plain, nothing, empty, many = received
        assert point == Point(1)
        assert isinstance(point, Point)
        assert (numbers, nothing, empty, many) == ({1}, None, b"", bytes(3 << 20))
        assert isinstance(plain["rank"], tuple)
        assert plain["rank"][1].tolist() == [[1, 1], [1, 1]]
        assert said.startswith("an object of type function cannot be sent to other ranks: ")
        assert ranks == [0, 1]
