"""A rank whose gloo workers are late leaves the interpreter in peace."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from shard_core import get_strategy
from shard_core.collectives import process_group, shutdown
from shard_core.collectives.process_group import ProcessGroupCollectives

# The main thread keeps the interpreter's lock from the last collective to the end of the script, so every
# worker of gloo is late for sure; by luck and load it is one in some launches. Without the cure the rank
# dies by SIGABRT. There are as many collectives as gloo has workers for a group: one more would begin
# when the lock is free, and be under way when the rank that is ahead leaves.
LATE_WORKERS = """
import sys, time
import torch, torch.distributed as dist
from shard_core.collectives.shutdown import close_process_group, settle_at_exit

dist.init_process_group("gloo")
world = dist.group.WORLD  # as a wrapped module holds it
tensors = [torch.ones(10) for _ in range(2)]
memory = [tensor.numpy() for tensor in tensors]  # torch gives the lock away to look at a tensor
sys.setswitchinterval(1000)
for tensor in tensors:
    dist.all_reduce(tensor, async_op=True)
patience = time.monotonic() + 5
while any((each != 2).any() for each in memory):
    if time.monotonic() > patience:  # once in some hundred launches a worker wants the lock before it begins
        time.sleep(0.01)
    assert time.monotonic() < patience + 60
end = time.monotonic() + 0.5
while time.monotonic() < end:
    pass
"""


@pytest.mark.parametrize("cure", ["close_process_group()", pytest.param("settle_at_exit()", marks=pytest.mark.long)])
def test_late_workers_do_not_kill_the_rank(cure):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LATE_WORKERS + cure],
            env=os.environ | place | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said


@pytest.fixture
def ends(monkeypatch):
    """Yield how process groups were ended, as ranks of NCCL, which torch for CPUs alone has not."""
    ended = []
    for name in ("close_process_group", "abort_process_groups"):
        whole = getattr(process_group, name)
        monkeypatch.setattr(process_group, name, lambda name=name, whole=whole: (ended.append(name), whole()))
    monkeypatch.setattr(ProcessGroupCollectives, "world_size", 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:nccl")
    return ended


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "close_process_group"),
        (SystemExit(0), "close_process_group"),
        (ZeroDivisionError(), "abort_process_groups"),
        (KeyboardInterrupt(), "abort_process_groups"),
    ],
    ids=str,
)
def test_a_rank_that_ends_by_an_error_waits_for_no_other_over_nccl(error, end, ends, monkeypatch):
    monkeypatch.setattr("shard_core.strategy.lifecycle.check_same_options", lambda *_: None)
    with contextlib.suppress(BaseException), get_strategy("ddp", accelerator="cpu"):
        if error:
            raise error
    assert ends == [end]
    assert not dist.is_initialized()


def test_over_gloo_ranks_never_wait_to_leave(ends, monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group=None: "cpu:gloo,cuda:gloo")
    mine = ProcessGroupCollectives()
    mine.connect(0, 1, torch.device("cpu"))
    mine.abort()
    mine.abort()  # what has left does nothing
    assert ends == ["close_process_group"]


def test_an_abort_that_hangs_keeps_no_error_back(monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr("shard_core._versions.abort_groups", stuck.wait)
    monkeypatch.setattr(shutdown, "_ABORT_SECONDS", 0.1)
    began = time.monotonic()
    shutdown.abort_process_groups()
    assert time.monotonic() - began < 5
    stuck.set()
