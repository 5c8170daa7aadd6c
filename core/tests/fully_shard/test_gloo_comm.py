"""Gathers and reductions over gloo give what torch's own give, and send less."""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from shard_core.fully_shard.gloo_comm import InPlaceGather, PairwiseScatter
from shard_core.testing.processes.world import World

SIZES = (0, 1, 7, 100_003, 2_500_000)
"""Elements of a shard: of several swaps the last, whose end none of them divides."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HERE = torch.device("cpu")


def said_by(rank, size, dtype):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator).to(dtype)


def reduced(size, dtype, op):
    """Reduce; return this rank's part of it, and of what torch makes of it."""
    group, scatter = dist.group.WORLD, PairwiseScatter()
    whole = said_by(dist.get_rank(), size * dist.get_world_size(), dtype)
    ours, torchs = (scatter.allocate((size,), dtype=dtype, device=HERE) for _ in range(2))
    assert scatter(ours, whole, group, op) is None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        dist.reduce_scatter_tensor(torchs, whole, op=op)
    return ours, torchs


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_reduction_is_torchs(worlds, size, dtype):
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        for ours, torchs in worlds(2).run(reduced, size, dtype, op):
            assert ours.dtype == dtype
            assert torch.equal(ours, torchs)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_many_ranks_are_added_up_in_their_order(worlds, ranks):
    size = 1_000_001
    for rank, (ours, torchs) in enumerate(worlds(ranks).run(reduced, size, torch.float32, dist.ReduceOp.AVG)):
        parts = [said_by(each, size * ranks, torch.float32).chunk(ranks)[rank] for each in range(ranks)]
        torch.testing.assert_close(ours, torchs)
        assert torch.equal(ours, sum(parts[1:], parts[0]) / ranks)


def gathered(size, dtype, in_place):
    gather, rank, ranks = InPlaceGather(), dist.get_rank(), dist.get_world_size()
    shard = said_by(rank, size, torch.float32).to(dtype)
    whole = gather.allocate((size * ranks,), dtype=dtype, device=HERE)
    if in_place:
        place = whole.narrow(0, size * rank, size)
        shard = place.copy_(shard)
    assert gather(whole, shard, dist.group.WORLD) is None
    return whole


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.uint8], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_each_shard_arrives_in_its_place(worlds, size, dtype, in_place):
    for ranks in (1, 2, 3) if size < 10**6 else (2,):
        expected = torch.cat([said_by(rank, size, torch.float32).to(dtype) for rank in range(ranks)])
        for whole in worlds(ranks).run(gathered, size, dtype, in_place):
            assert torch.equal(whole.view(torch.uint8), expected.view(torch.uint8))


def waited_for():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole, part = torch.empty(ranks), torch.empty(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        InPlaceGather()(whole, torch.full((1,), rank + 1.0), dist.group.WORLD, async_op=True).wait()
        PairwiseScatter()(part, whole, dist.group.WORLD, dist.ReduceOp.SUM, async_op=True).wait()
        greatest = torch.empty(1)
        PairwiseScatter()(greatest, whole + rank, dist.group.WORLD, dist.ReduceOp.MAX)
    return whole, part, greatest


def test_whoever_waits_himself_or_asks_for_more_gets_torchs_own(worlds):
    for rank, (whole, part, greatest) in enumerate(worlds(2).run(waited_for)):
        assert whole.tolist() == [1.0, 2.0]
        assert part.tolist() == [2 * (rank + 1)]
        assert greatest.tolist() == [rank + 2]


def swapped_in_between():
    """Reduce while something that users send each other is under way."""
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    mail, part = torch.zeros(5), torch.empty(3)
    arriving = dist.irecv(mail, other)
    PairwiseScatter()(part, torch.full((6,), rank + 1.0), dist.group.WORLD, dist.ReduceOp.SUM)
    dist.send(torch.full((5,), 10.0 + rank), other)
    arriving.wait()
    return mail.tolist(), part.tolist()


def test_what_users_send_each_other_is_not_mistaken_for_it(worlds):
    assert worlds(2).run(swapped_in_between) == [([11.0] * 5, [3.0] * 3), ([10.0] * 5, [3.0] * 3)]


class Messages(TorchDispatchMode):
    """Notes how many elements travel from one rank to another, and what else is said."""

    def __init__(self):
        super().__init__()
        self.sent, self.others = [], set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if func.namespace == "c10d":
            self.sent += [args[0][0].numel()] * (name == "send")
            # The lengths are compared before: one number of each rank.
            compares = name == "_allgather_base_" and args[1].numel() == 1
            self.others |= set() if compares else {name} - {"send", "recv_"}
        return func(*args, **(kwargs or {}))


def sent():
    part = torch.empty(3_000_000)
    with Messages() as messages:
        PairwiseScatter()(part, torch.ones(part.numel() * dist.get_world_size()), dist.group.WORLD, dist.ReduceOp.AVG)
    assert torch.equal(part, torch.ones_like(part))
    return messages.sent, messages.others


def test_a_rank_sends_each_other_its_part_once_in_pieces(worlds):
    for ranks in (2, 3):
        for pieces, others in worlds(ranks).run(sent):
            assert not others
            assert sum(pieces) == 3_000_000 * (ranks - 1)
            assert max(pieces) * ranks * 4 <= 8 * 2**20


def alone(rank):
    group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
    waited = 0.0
    if dist.get_rank() == rank:
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Timed out"):
            PairwiseScatter()(torch.empty(9), torch.ones(18), group, dist.ReduceOp.SUM)
        waited = time.monotonic() - began
    dist.barrier()  # who leaves earlier would be noticed by that
    return waited


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(rank):
    with World(2) as world:
        assert 0.5 < world.run(alone, rank)[rank] < 20
