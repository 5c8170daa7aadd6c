"""Ranks reduce, gather and broadcast; whoever asks for the impossible hears why."""

import dataclasses
from collections import namedtuple
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shard_core import get_strategy
from shard_core.errors import CollectiveError


def value(rank: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()).view(shape) + rank + 1).to(dtype)


def reduced(op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    with get_strategy("ddp") as strategy:
        mine = value(strategy.global_rank, dtype, shape)
        result = strategy.all_reduce(mine, reduce_op=op)
        assert torch.equal(mine, value(strategy.global_rank, dtype, shape)), "the argument is left alone"
        return result


EXPECTED = {
    "sum": lambda stack: stack.sum(0),
    "mean": lambda stack: stack.mean(0),
    "AVG": lambda stack: stack.mean(0),
    "max": lambda stack: stack.max(0).values,
    "min": lambda stack: stack.min(0).values,
    "product": lambda stack: stack.prod(0),
}
WHOLE = ["sum", "max", "min", "product"]


@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *((op, dtype) for op in EXPECTED for dtype in (torch.float32, torch.float64, torch.bfloat16)),
        *((op, torch.int64) for op in WHOLE),
    ],
    ids=str,
)
def test_all_reduce(worlds: Any, op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    truth = EXPECTED[op](torch.stack([value(rank, dtype, shape).double() for rank in range(3)])).to(dtype)
    for result in worlds(3).run(reduced, op, dtype, shape):
        assert result.dtype == dtype
        torch.testing.assert_close(result, truth)


def several() -> Any:
    with get_strategy("ddp") as strategy:
        rank = strategy.global_rank
        odd = torch.arange(6).view(2, 3).t() + rank
        return {
            "gather": strategy.all_gather(odd),
            "broadcast": strategy.broadcast({"rank": rank, "tensor": torch.tensor(rank)}, src=1),
            "number": strategy.all_reduce(float(rank)),
            "text": strategy.reduce("as it is"),
            "tensor": strategy.reduce(torch.tensor(float(rank)), reduce_op="sum"),
        }


def test_other_verbs(worlds: Any) -> None:
    base = torch.arange(6).view(2, 3).t()
    for got in worlds(2).run(several):
        assert torch.equal(got["gather"], torch.stack([base, base + 1]))
        assert got["broadcast"]["rank"] == 1
        assert got["broadcast"]["tensor"] == 1
        assert got["number"] == 0.5
        assert got["text"] == "as it is"
        assert got["tensor"] == 1.0


def gathered_gradient() -> torch.Tensor:
    with get_strategy("ddp") as strategy:
        mine = torch.tensor([1.0, 2.0], requires_grad=True)
        weights = torch.arange(4.0).view(2, 2) * (strategy.global_rank + 1)
        (strategy.all_gather(mine, sync_grads=True) * weights).sum().backward()
        assert not strategy.all_gather(mine).requires_grad
        assert mine.grad is not None
        return mine.grad


def test_gradients_flow_back_through_a_gather(worlds: Any) -> None:
    first, second = worlds(2).run(gathered_gradient)
    assert first.tolist() == [0.0, 3.0]
    assert second.tolist() == [6.0, 9.0]


@pytest.mark.parametrize("name", ["single", "ddp"])
@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.all_reduce(torch.ones(1), reduce_op="summ"), "there is no reduction 'summ'; did you mean 'sum'"),
        (lambda s: s.all_reduce(torch.ones(1), group="tensor"), "has no mesh axis 'tensor'"),
        (lambda s: s.broadcast(1, src=4), "there is no rank 4 to broadcast from"),
    ],
)
def test_the_impossible_gets_a_sentence(name: str, ask: Any, message: str) -> None:
    with get_strategy(name) as strategy, pytest.raises(CollectiveError, match=message):
        ask(strategy)


@pytest.mark.parametrize("name", ["single", "ddp"])
def test_the_mean_of_integers_is_refused(name: str) -> None:
    with get_strategy(name) as strategy, pytest.raises(CollectiveError, match="the mean of int64 values is not whole"):
        strategy.all_reduce(torch.ones(2, dtype=torch.int64))


def test_single_answers_alone() -> None:
    with get_strategy("single") as strategy:
        assert strategy.all_reduce(2.0) == 2.0
        assert strategy.all_gather(torch.ones(2)).shape == (1, 2)
        assert strategy.broadcast("x") == "x"
        strategy.barrier()


Metrics = namedtuple("Metrics", ["loss", "seen"])


@dataclasses.dataclass(frozen=True)
class Report:
    loss: torch.Tensor
    seen: int


def structure(rank: int) -> dict[str, Any]:
    """Return a rank's metrics, keys in an order of its own."""
    entries = {
        "loss": torch.tensor([rank + 1.0, 2.0]),
        "nested": {
            "list": [rank + 0.5, torch.tensor(rank)],
            "tuple": (Metrics(float(rank), rank), Report(*[rank] * 2)),
        },
        "empty": [],
    }
    return dict(sorted(entries.items(), reverse=bool(rank)))


def talks_in_structures() -> dict[str, Any]:
    with get_strategy("ddp") as strategy:
        rank = strategy.global_rank
        given = structure(rank)
        results = {verb: getattr(strategy, verb)(given, reduce_op="sum") for verb in ("reduce", "all_reduce")}
        results["all_gather"] = strategy.all_gather(given)
        results["untouched"] = repr(given) == repr(structure(rank))
        results["order"] = list(results["reduce"]) == list(given)
        results["mean"] = strategy.reduce([float(rank)])
        return results


def test_structures_are_reduced_and_gathered_leaf_by_leaf(worlds: Any) -> None:
    for got in worlds(2).run(talks_in_structures):
        for sums in (got["reduce"], got["all_reduce"]):
            assert torch.equal(sums["loss"], torch.tensor([3.0, 4.0]))
            half, whole = sums["nested"]["list"]
            assert (half.item(), half.dtype, whole.item(), whole.dtype) == (2.0, torch.float32, 1, torch.int64)
            metrics, report = sums["nested"]["tuple"]
            assert isinstance(metrics, Metrics)
            assert (metrics.loss.item(), metrics.seen.item()) == (1.0, 1)
            assert isinstance(report, Report)
            assert report.seen.item() == 1
            assert sums["empty"] == []
        assert torch.equal(got["all_gather"]["loss"], torch.tensor([[1.0, 2.0], [2.0, 2.0]]))
        assert got["all_gather"]["nested"]["list"][0].tolist() == [0.5, 1.5]
        assert got["untouched"]
        assert got["order"]
        assert [mean.item() for mean in got["mean"]] == [0.5]


REDUCTIONS = [
    (None, 1.5),
    (dist.ReduceOp.AVG, 1.5),
    (dist.ReduceOp.SUM, 3.0),
    (dist.ReduceOp.MAX, 2.0),
    (dist.ReduceOp.MIN, 1.0),
    (dist.ReduceOp.PRODUCT, 2.0),
]


def reduced_by_members() -> list[tuple[float, float]]:
    with get_strategy("ddp") as strategy:
        mine = torch.tensor(strategy.global_rank + 1.0)
        return [
            (
                strategy.reduce(mine, reduce_op=op).item(),
                strategy.all_reduce(mine, reduce_op=op and dist.ReduceOp(op)).item(),
            )
            for op, _ in REDUCTIONS
        ]


def test_members_of_torchs_reduce_op_have_their_names(worlds: Any) -> None:
    for got in worlds(2).run(reduced_by_members):
        assert got == [(truth, truth) for _, truth in REDUCTIONS]


class Nameless:
    def __repr__(self) -> str:
        return "nameless"


def differing(what: str) -> str:
    with get_strategy("ddp") as strategy:
        rank = strategy.global_rank
        given: Any = {
            "keys": {"loss": 1.0, ("b" if rank else "a"): 1.0},
            "length": [1.0] * (rank + 1),
            "shape": {"loss": torch.ones(rank + 1)},
            "dtype": {"loss": torch.ones(1, dtype=torch.float64 if rank else torch.float32)},
            "leaf": {"loss": "text" if rank else 1.0},
            "fraction": {"loss": 1.0 if rank else Fraction(1, 2)},
            "too large": {"loss": 10**30 if rank else 1},
            "twice": {Nameless(): 1.0} | ({} if rank else {Nameless(): 1.0}),
        }[what]
        with pytest.raises(CollectiveError) as error:
            strategy.reduce(given)
        with pytest.raises(CollectiveError):
            strategy.all_gather(given)
        assert strategy.all_reduce(1, reduce_op="sum") == 2, "nobody waits for anybody"
        return str(error.value)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("keys", "ranks gave different structures to reduce: rank 1 has nothing at ['a'], where rank 0 has float32 ()"),
        ("length", "rank 1 has float32 () at [1], where rank 0 has nothing"),
        ("shape", "rank 1 has float32 (2,) at ['loss'], where rank 0 has float32 (1,)"),
        ("dtype", "rank 1 has float64 (1,) at ['loss'], where rank 0 has float32 (1,)"),
        ("leaf", "rank 1 has str at ['loss'], where rank 0 has float32 ()"),
        ("fraction", "rank 1 has float32 () at ['loss'], where rank 0 has Fraction that torch has no dtype for"),
        ("too large", "rank 1 has int that torch has no dtype for at ['loss'], where rank 0 has int64 ()"),
        ("twice", "rank 1 has float32 () at [nameless], where rank 0 has two keys written alike"),
    ],
)
def test_structures_that_differ_between_ranks_are_refused_on_all(worlds: Any, what: str, message: str) -> None:
    for error in worlds(2).run(differing, what):
        assert message in error


@pytest.mark.parametrize("name", ["single", "ddp"])
@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda s: s.reduce({"a": [1.0, "x"]}), r"reduce takes .*, not str at \['a'\]\[1\]"),
        (lambda s: s.reduce({"a": None}), r"not NoneType at \['a'\]"),
        (lambda s: s.all_gather([{1, 2}]), r"all_gather takes tensors and numbers, .*, not set at \[0\]; leave it out"),
        (lambda s: s.all_reduce("x"), "all_reduce takes tensors and numbers, .*, not str; "),
        (lambda s: s.reduce({"n": Fraction(1, 2)}), r"not Fraction that torch has no dtype for at \['n'\]; "),
        (lambda s: s.all_reduce(10**30), "not int that torch has no dtype for; "),
        (lambda s: s.reduce({Nameless(): 1.0, Nameless(): 2.0}), r"two keys that are both written \[nameless\]"),
        (lambda s: s.reduce({"n": 3}), r"at \['n'\], the mean of int64 values is not whole"),
        (lambda s: s.reduce({"n": True}), r"at \['n'\], the mean of bool values is not whole"),
        (lambda s: s.all_reduce({"n": True}, reduce_op="sum"), r"at \['n'\], the sum of bool values is no truth value"),
        (lambda s: s.all_reduce(torch.ones(2) > 0, reduce_op="sum"), "ask for reduce_op='max' or 'min'"),
        (lambda s: s.reduce(1.0, reduce_op="summ"), "there is no reduction 'summ'"),
        (lambda s: s.reduce(torch.ones(1), reduce_op=dist.ReduceOp.BAND), "there is no reduction 'BAND'"),
        (lambda s: s.all_reduce(torch.ones(1), reduce_op=dist.ReduceOp.PREMUL_SUM), "no reduction 'PREMUL_SUM'"),
    ],
)
def test_what_cannot_be_reduced_gets_a_sentence(name: str, ask: Any, message: str) -> None:
    with get_strategy(name) as strategy, pytest.raises(CollectiveError, match=message):
        ask(strategy)


def test_single_answers_structures_alone() -> None:
    with get_strategy("single") as strategy:
        reduced = strategy.reduce({"any": True, "n": [3]}, reduce_op="max")
        assert (reduced["any"].dtype, reduced["n"][0].item()) == (torch.bool, 3)
        assert strategy.all_gather({"n": 3})["n"].tolist() == [3]
        assert strategy.all_gather(2.0).tolist() == [2.0]
        assert strategy.reduce(None) is None
