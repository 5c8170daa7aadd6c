"""Reducing and gathering tensors: every operation, dtype and shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shard_core.capability import Capability
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_DTYPES = (*_FLOATS, torch.int64, torch.bool)
_OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
    "min": lambda stack: stack.amin(0),
    "product": lambda stack: stack.prod(0),
}
_LARGE = 300_001  # more than a MiB of float32, and no multiple of any number of ranks
_SHAPES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "0-d": lambda line: line[3],
    "empty": lambda line: line[:0].view(3, 0),
    "transposed": lambda line: line[:6].view(2, 3).t(),
    "strided": lambda line: line[:12].view(3, 4)[:, ::2],
    "expanded": lambda line: line[:3].view(3, 1).expand(3, 2),
    "more than a MiB": lambda line: line,
}
_ALIKE = "results_are_alike_on_all_ranks"
_ALL_REDUCE = "all_reduce_has_its_operations"
_GATHER = "gathers_in_rank_order"


class Tensors(Suite):
    """Reducing and gathering tensors: every operation, dtype and shape."""

    @promise(every_size=False)
    def test_results_are_alike_on_all_ranks(self, ranks: Ranks) -> None:
        """What ranks reduce or gather has the same bits on every rank.

        Usual cause:
            Each rank adds up what it received in its own order, or keeps its own part unrounded.
        """
        first, *others = ranks.run(talk_in_fractions)
        for rank, other in enumerate(others, start=1):
            for what, tensor in first.items():
                assert torch.equal(tensor, other[what]), f"{what}: rank {rank} has other numbers than rank 0"

    @promise(after=(_ALIKE,), every_size=False)
    def test_all_reduce_has_its_operations(self, ranks: Ranks) -> None:
        """An all_reduce gives the mean, sum, max, min or product over all ranks, in the tensor's dtype.

        Usual cause:
            An operation is mapped to another, the mean is divided by a wrong number, or a dtype the engine cannot
            carry comes back as another one.
        """
        for answers in ranks.run(reduce_every_dtype):
            for (operation, dtype), tensor in answers.items():
                _assert_reduced(tensor, operation, [_line(rank, dtype, 12) for rank in range(ranks.size)], str(dtype))

    @promise(after=(_ALL_REDUCE,), every_size=False)
    def test_all_reduce_takes_any_shape(self, ranks: Ranks) -> None:
        """An all_reduce takes numbers and tensors that are 0-d, empty, strided or too large for one message.

        Usual cause:
            The engine is handed a view's memory instead of its elements, or an empty tensor skips the call on one rank.
        """
        for answers in ranks.run(reduce_every_shape):
            for name, tensor in answers.items():
                parts = [_SHAPES[name](_line(rank, torch.float32, _LARGE)) for rank in range(ranks.size)]
                _assert_reduced(tensor, "sum", parts, name)

    @promise(after=(_ALL_REDUCE,), every_size=False)
    def test_all_reduce_leaves_its_input(self, ranks: Ranks) -> None:
        """An all_reduce returns a new tensor and leaves the one it was given as it was.

        Usual cause:
            The engine reduces in place; in a world of one, the input itself is returned.
        """
        for rank, (is_new, before, after) in enumerate(ranks.run(reduce_and_look_back)):
            assert torch.equal(before, after), (
                f"rank {rank}: the input was {before.tolist()}, now it is {after.tolist()}"
            )
            assert is_new, f"rank {rank}: the result lies in the memory of the input"

    @promise(after=(_ALL_REDUCE,), every_size=False)
    def test_reduces_tensors_only(self, ranks: Ranks) -> None:
        """Every rank gets from reduce what all_reduce gives; a bare value that is no tensor is returned as it is.

        Usual cause:
            Only one rank gets the result, or a number is turned into a tensor.
        """
        total = float(sum(range(1, ranks.size + 1)))
        for rank, (tensor, text, number) in enumerate(ranks.run(reduce_mixed)):
            assert tensor == total, f"rank {rank}: the sum over all ranks is {tensor}, it should be {total}"
            assert (text, number) == ("as it is", rank + 0.5), f"rank {rank}: {(text, number)!r} is not what was given"

    @promise(after=("reduces_tensors_only", "all_reduce_leaves_its_input"), every_size=False)
    def test_reduces_structures(self, ranks: Ranks) -> None:
        """In dicts, lists and tuples every leaf is reduced, numbers too, whatever order a rank's keys stand in.

        A member of torch.distributed.ReduceOp means its name, and None the mean.

        Usual cause:
            What is no tensor is returned as it is: every rank goes on with values of its own.
        """
        parts = [torch.tensor(rank + 0.5) for rank in range(ranks.size)]
        for answers in ranks.run(reduce_structures):
            for verb, operation, structure in answers:
                for place, leaf in structure.items():
                    what = f"{place} in what {verb} was given"
                    assert isinstance(leaf, torch.Tensor), f"{operation} of {what} is {leaf!r}, which is no tensor"
                    _assert_reduced(leaf, operation, [part + len(place) for part in parts], what)

    @promise(after=(_ALIKE,), every_size=False)
    def test_gathers_in_rank_order(self, ranks: Ranks) -> None:
        """An all_gather gives a tensor of shape (ranks, *shape): every rank's, in rank order, without gradients.

        Usual cause:
            Parts are concatenated instead of stacked, stand in the order they came in, or lose a view's strides.
        """
        for answers in ranks.run(gather_everything):
            for (what, dtype), (tensor, has_gradient) in answers.items():
                view = _SHAPES[what]
                truth = torch.stack([view(_line(rank, dtype, _LARGE)) for rank in range(ranks.size)])
                torch.testing.assert_close(tensor, truth, rtol=0, atol=0, msg=_named(f"all_gather of {what}, {dtype}"))
                assert not has_gradient, f"all_gather of {what} keeps a graph nobody asked for"

    @promise(needs=Capability.SYNC_GRADS, after=(_GATHER,), every_size=False)
    def test_gathers_with_gradients(self, ranks: Ranks) -> None:
        """With sync_grads=True, all_gather brings each rank the gradient of all ranks' losses by its own part.

        Usual cause:
            The gathered tensor is detached from the graph, or each rank keeps only its own loss's gradient.
        """
        everyone = sum(range(1, ranks.size + 1))
        for rank, gradient in enumerate(ranks.run(gather_with_gradients)):
            expected = [2.0 * rank * everyone, (2.0 * rank + 1.0) * everyone]
            assert gradient == expected, f"rank {rank}: the gradient is {gradient}, it should be {expected}"

    @promise(after=(_ALL_REDUCE, _GATHER), every_size=False)
    def test_data_ranks_are_a_group(self, ranks: Ranks) -> None:
        """The group "data_parallel" stands for the ranks that see different data, on every strategy.

        Usual cause:
            The engine has no mesh, or calls the axis by another name.
        """
        for rank, (place, size, members, total) in enumerate(ranks.run(talk_among_data_ranks)):
            assert len(members) == size, f"rank {rank}: data goes to {size} ranks, the group has {len(members)}"
            assert members[place] == rank, f"rank {rank} is data rank {place}, but there the group has {members[place]}"
            assert total == sum(members), f"rank {rank}: the group's sum is {total}, it should be {sum(members)}"


def talk_in_fractions(subject: Subject) -> dict[str, torch.Tensor]:
    """Reduce and gather numbers whose sum depends on the order of addition."""
    with subject.strategy() as strategy:
        generator = torch.Generator().manual_seed(strategy.global_rank)
        line = torch.randn(10_007, generator=generator).to(strategy.root_device)
        answers = {
            f"all_reduce {operation} of {dtype}": strategy.all_reduce(line.to(dtype), reduce_op=operation)
            for dtype in _FLOATS
            for operation in ("sum", "mean", "product")
        }
        answers["all_gather"] = strategy.all_gather(line)
        return {what: tensor.cpu() for what, tensor in answers.items()}


def reduce_every_dtype(subject: Subject) -> dict[tuple[str, torch.dtype], torch.Tensor]:
    """Reduce a short line of every dtype by every operation that makes sense."""
    with subject.strategy() as strategy:
        return {
            (operation, dtype): strategy.all_reduce(_mine(strategy, dtype, 12), reduce_op=operation).cpu()
            for dtype in _DTYPES
            for operation in _operations(dtype)
        }


def reduce_every_shape(subject: Subject) -> dict[str, torch.Tensor]:
    """Sum every shape of tensor, and check a plain number on the way."""
    with subject.strategy() as strategy:
        line = _mine(strategy, torch.float32, _LARGE)
        number = strategy.all_reduce(strategy.global_rank + 0.5, reduce_op="sum")
        expected = sum(rank + 0.5 for rank in range(strategy.world_size))
        assert torch.equal(number.cpu(), torch.tensor(expected)), f"all_reduce of numbers is {number}, not {expected}"
        return {name: strategy.all_reduce(view(line), reduce_op="sum").cpu() for name, view in _SHAPES.items()}


def reduce_and_look_back(subject: Subject) -> tuple[bool, torch.Tensor, torch.Tensor]:
    """Reduce, and return whether the result is new and the input before and after."""
    with subject.strategy() as strategy:
        given = _mine(strategy, torch.float32, 12)
        before = given.clone()
        result = strategy.all_reduce(given, reduce_op="sum")
        after = given.cpu().clone()
        result.add_(1.0)
        return torch.equal(given.cpu(), after), before.cpu(), after


def reduce_mixed(subject: Subject) -> tuple[float, Any, Any]:
    """Reduce a tensor, a text and a number."""
    with subject.strategy() as strategy:
        tensor = torch.tensor(strategy.global_rank + 1.0, device=strategy.root_device)
        total = strategy.reduce(tensor, reduce_op="sum").item()
        return total, strategy.reduce("as it is"), strategy.reduce(strategy.global_rank + 0.5)


def reduce_structures(subject: Subject) -> list[tuple[str, str, dict[str, Any]]]:
    """Reduce a tensor and numbers in every kind of structure, by everything that means a reduction."""
    operations: dict[str, list[Any]] = {
        "mean": [None, dist.ReduceOp.AVG],
        "sum": ["sum", dist.ReduceOp.SUM],
        "max": [dist.ReduceOp.MAX],
        "min": [dist.ReduceOp.MIN],
        "product": [dist.ReduceOp.PRODUCT],
    }
    with subject.strategy() as strategy:
        return [
            (verb, operation, _flat(getattr(strategy, verb)(_nested(strategy), reduce_op=reduce_op)))
            for verb in ("reduce", "all_reduce")
            for operation, spellings in operations.items()
            for reduce_op in spellings
        ]


def _nested(strategy: Strategy) -> dict[str, Any]:
    """Build a nest of this rank's number, in places whose names are of different lengths, which is added to it."""
    rank = strategy.global_rank
    mine = {place: rank + 0.5 + len(place) for place in ("a", "bb", "ccc", "dddd")}
    tensor = torch.tensor(mine["bb"], device=strategy.root_device)
    given = {"a": mine["a"], "inner": {"tensor": tensor, "pair": (mine["ccc"], [mine["dddd"]])}}
    return dict(reversed(given.items())) if rank % 2 else given


def _flat(structure: Any) -> dict[str, Any]:
    third, (fourth,) = structure["inner"]["pair"]
    leaves = {"a": structure["a"], "bb": structure["inner"]["tensor"], "ccc": third, "dddd": fourth}
    return {place: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for place, leaf in leaves.items()}


def gather_everything(subject: Subject) -> dict[tuple[str, torch.dtype], tuple[torch.Tensor, bool]]:
    """Gather every shape, and every dtype."""
    with subject.strategy() as strategy:
        line = _mine(strategy, torch.float32, _LARGE).requires_grad_()
        given = {(what, line.dtype): view(line) for what, view in _SHAPES.items()}
        given |= {("0-d", dtype): _mine(strategy, dtype, _LARGE)[3] for dtype in _DTYPES if dtype != line.dtype}
        gathered = {what: strategy.all_gather(tensor) for what, tensor in given.items()}
        return {what: (tensor.detach().cpu(), tensor.requires_grad) for what, tensor in gathered.items()}


def gather_with_gradients(subject: Subject) -> list[float]:
    """Compute a loss in which every rank weighs every rank's part, and return the gradient of this rank's."""
    with subject.strategy() as strategy:
        mine = torch.ones(2, device=strategy.root_device, requires_grad=True)
        gathered = strategy.all_gather(mine, sync_grads=True)
        places = torch.arange(2.0 * strategy.world_size, device=strategy.root_device).view(-1, 2)
        (gathered * places * (strategy.global_rank + 1)).sum().backward()
        return [] if mine.grad is None else mine.grad.tolist()


def talk_among_data_ranks(subject: Subject) -> tuple[int, int, list[int], int]:
    """Return this data rank, how many there are, the global ranks of them all, and their sum."""
    with subject.strategy() as strategy:
        data = strategy.distributed_sampler_kwargs
        mine = torch.tensor(strategy.global_rank, device=strategy.root_device)
        members = strategy.all_gather(mine, group="data_parallel").tolist()
        total = strategy.all_reduce(mine, group="data_parallel", reduce_op="sum")
        return data["rank"], data["num_replicas"], members, int(total.item())


def _line(rank: int, dtype: torch.dtype, length: int) -> torch.Tensor:
    """Return the numbers of one rank: small, so that every dtype holds them and what they reduce to."""
    numbers = (torch.arange(length) + rank) % 5
    return numbers % 2 == 0 if dtype == torch.bool else (numbers + 1).to(dtype)


def _mine(strategy: Strategy, dtype: torch.dtype, length: int) -> torch.Tensor:
    return _line(strategy.global_rank, dtype, length).to(strategy.root_device)


def _operations(dtype: torch.dtype) -> list[str]:
    if dtype == torch.bool:
        return ["max", "min"]  # whether any, and whether all
    return [operation for operation in _OPERATIONS if dtype.is_floating_point or operation != "mean"]


def _assert_reduced(tensor: torch.Tensor, operation: str, parts: list[torch.Tensor], what: str) -> None:
    truth = _OPERATIONS[operation](torch.stack(parts).double()).to(parts[0].dtype)
    torch.testing.assert_close(tensor, truth, msg=_named(f"all_reduce {operation} of {what}"))


def _named(what: str) -> Callable[[str], str]:
    return lambda difference: f"{what} is wrong: {difference}"
