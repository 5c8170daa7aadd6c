"""Ranks reduce, gather and broadcast; whoever asks for the impossible hears why."""

from typing import Any

import pytest
import torch

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
