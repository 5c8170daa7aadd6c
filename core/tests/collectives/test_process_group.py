"""The error a rank raises when another is gone, and from where a group carries tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from shard_core import get_strategy
from shard_core.collectives.process_group import ProcessGroupCollectives, carrying_device, translate_torch_errors
from shard_core.coordinator import SECRET_VARIABLE
from shard_core.errors import CollectiveError, SetupError

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
        pytest.param("all_reduce(torch.ones(1))", "rank 0 waited in a reduction in vain: ", marks=pytest.mark.long),
        pytest.param("all_gather(torch.ones(1))", "rank 0 waited in a gather in vain: ", marks=pytest.mark.long),
        ("collectives.gather_objects(1)", "rank 0 waited in an exchange in vain: "),
    ],
)
def test_a_rank_that_has_died_is_told_of_in_a_sentence(tmp_path, call, sentence):
    script = tmp_path / "left.py"
    script.write_text(_LEFT.format(call=call))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert sentence in done.stdout, done.stderr
    assert "a rank that has died or left shows why in its own output" in done.stdout


_LEFT_IN_TRAINING = """\
import sys
from datetime import timedelta

import torch

from shard_core import get_strategy
from shard_core.errors import CollectiveError

strategy = get_strategy("ddp", accelerator="cpu", timeout=timedelta(seconds=5))
strategy.setup_environment()
model = strategy.setup_module(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
loss = model(torch.ones(2, 4)).sum()
strategy.barrier()  # both are there
if strategy.global_rank == 1:
    {leave}
try:
    {call}
except CollectiveError as error:
    sys.stdout.write(f"{{error}}\\n")
    sys.stdout.flush()
    raise
"""

_RAISE, _COME_LATE = 'raise ValueError("the batch is empty")', "import time; time.sleep(30); sys.exit(1)"


@pytest.mark.parametrize(
    ("leave", "call", "sentence"),
    [
        pytest.param(
            _RAISE,
            "strategy.backward(loss, model)",
            "rank 0 waited in a backward in vain: ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            _RAISE,
            "model(torch.ones(2, 4))",
            "rank 0 waited in a broadcast of buffers in vain: ",
            marks=pytest.mark.long,
        ),
        (_COME_LATE, "strategy.backward(loss, model)", "rank 0 waited in a backward in vain: Timed out waiting 5000ms"),
    ],
)
def test_a_rank_that_leaves_or_is_late_in_training_is_told_of_in_a_sentence(tmp_path, leave, call, sentence):
    script = tmp_path / "left.py"
    script.write_text(_LEFT_IN_TRAINING.format(leave=leave, call=call))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert sentence in done.stdout, done.stderr
    assert "/gloo/" not in done.stdout
    assert "and one that is late must come within the strategy's `timeout`" in done.stdout


def test_other_errors_are_raised_as_they_are():
    with pytest.raises(RuntimeError, match=r"^mine$"), translate_torch_errors("a backward", among_others=True):
        raise RuntimeError("mine")
    with pytest.raises(SetupError, match=r"^ours$"), translate_torch_errors("a reduction"):
        raise SetupError("ours")


class Point(NamedTuple):
    """What a user may send."""

    x: int


def broadcasts(secret: str | None) -> tuple[list[Any], str, list[int]]:
    """Broadcast from the last rank objects of all kinds, then one that cannot be sent."""
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


@pytest.fixture
def group(request):
    """Create a process group of one rank, with the backends of a configuration."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def reduces_views(size: int) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    with get_strategy("ddp" if size > 1 else "single", accelerator="cpu") as strategy:
        grid = torch.arange(12.0).view(3, 4) * (strategy.global_rank + 1)
        columns = grid.t().contiguous().t()
        views = [columns, columns if strategy.global_rank else grid, grid[:, ::2], grid[:, :1].expand(3, 2)]
        return [(mean, mean.stride()) for mean in map(strategy.collectives.all_reduce, views)]


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_reduced_is_laid_out_as_it_was(worlds: Any, size: int) -> None:
    for rank, answers in enumerate(worlds(size).run(reduces_views, size)):
        grid = torch.arange(12.0).view(3, 4) * (size + 1) / 2
        for (found, _), right in zip(answers, (grid, grid, grid[:, ::2], grid[:, :1].expand(3, 2)), strict=True):
            assert torch.equal(found, right)
        assert answers[0][1] == (1, 3)
        assert answers[1][1] == ((1, 3) if rank else (4, 1))


@pytest.mark.parametrize(
    ("group", "device", "own", "there"),
    [
        ("gloo", "cpu", "cpu", "cpu"),
        ("gloo", "cpu", "cuda:1", "cpu"),
        ("gloo", "cuda:1", "cuda:1", "cuda:1"),
        ("gloo", "xla:0", "xla:0", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu", "cuda:1", "cpu"),
        ("cpu:gloo", "cuda:1", "cuda:1", "cpu"),
        # as NCCL alone, which needs a GPU to start: nothing from host memory
        ("cuda:gloo", "cpu", "cuda:1", "cuda:1"),
        ("cuda:gloo", "cuda:0", "cuda:1", "cuda:0"),
    ],
    indirect=["group"],
)
@pytest.mark.usefixtures("group")
def test_tensors_go_to_where_the_group_carries_from(device, own, there):
    assert carrying_device(torch.device(device), None, torch.device(own)) == torch.device(there)


@pytest.mark.parametrize("group", ["cuda:gloo"], indirect=True)
@pytest.mark.parametrize("sync_grads", [False, True])
@pytest.mark.usefixtures("group")
def test_a_group_that_does_not_reach_a_rank_is_named(sync_grads):
    with pytest.raises(CollectiveError, match="carries tensors of cuda devices only, and this rank's is cpu; give pro"):
        ProcessGroupCollectives().all_gather(torch.ones(1), sync_grads=sync_grads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a CUDA device")
def test_nccl_alone_takes_tensors_from_host_memory():
    with get_strategy("ddp", accelerator="cuda", devices=1, process_group_backend="nccl") as strategy:
        mine = torch.ones(2, requires_grad=True)
        gathered = strategy.all_gather(mine, sync_grads=True)
        gathered.mul(3.0).sum().backward()
        assert (gathered.device.type, gathered.tolist()) == ("cpu", [[1.0, 1.0]])
        assert mine.grad is not None
        assert mine.grad.tolist() == [3.0, 3.0]
        assert strategy.all_gather(mine).tolist() == [[1.0, 1.0]]
        assert strategy.all_reduce({"n": [1.0]})["n"][0].item() == 1.0
        assert strategy.broadcast({"x": 1}) == {"x": 1}
        assert strategy.collectives.gather_objects("x") == ["x"]


def test_who_was_refused_keeps_no_group_from_those_that_leave() -> None:
    owner, refused = ProcessGroupCollectives(), ProcessGroupCollectives()
    owner.connect(0, 1, torch.device("cpu"))
    with pytest.raises(CollectiveError, match="rank 1 of 2"):
        refused.connect(1, 2, torch.device("cpu"))
    owner.close()
    assert not dist.is_initialized()
