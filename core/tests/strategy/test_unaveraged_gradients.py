"""A step compares gradients that no backward of the strategy made, once, and takes those that are alike everywhere."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import SetupError
from shard_core.gradients import are_alike, local_gradients


def words() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1))


#: What each of two ranks looks up.
SAMPLES = torch.tensor([1, 2, 2]), torch.tensor([4, 2, 5])


def losses(model: nn.Module, rank: int) -> torch.Tensor:
    loss: torch.Tensor = model(SAMPLES[rank]).square().mean()
    return loss


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def sparse_steps(late: bool) -> list[torch.Tensor]:
    """Step twice on the same gradients, of which one is sparse."""
    with get_strategy("ddp") as strategy:
        module = words()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if late:
            model = strategy.setup_module(module)
        else:
            model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        strategy.backward(losses(model, strategy.global_rank), model)
        if late:
            strategy.setup_optimizer(optimizer)
        strategy.optimizer_step(optimizer)
        strategy.optimizer_step(optimizer)
        return weights(module)


def sparse_steps_in_plain_pytorch() -> list[torch.Tensor]:
    module = words()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for rank in range(2):
        (losses(module, rank) / 2).backward()
    optimizer.step()
    optimizer.step()
    return weights(module)


@pytest.mark.parametrize("late", [False, True])
def test_sparse_gradients_are_stepped_twice(worlds: Any, late: bool) -> None:
    for mine in worlds(2).run(sparse_steps, late):
        for each, truth in zip(mine, sparse_steps_in_plain_pytorch(), strict=True):
            torch.testing.assert_close(each, truth)


def sparse(row: int, value: float, others: int = 2) -> nn.Parameter:
    """A parameter whose gradient has two rows, one of them given twice."""
    parameter = nn.Parameter(torch.zeros(6, 1))
    parameter.grad = torch.sparse_coo_tensor([[row, others, others]], [[value], [1.0], [2.0]], (6, 1))
    return parameter


def compared(kind: str) -> bool:
    collectives = ProcessGroupCollectives()
    own = float(collectives.rank)
    parameter = {
        "same": lambda: sparse(1, 5.0),
        "other values": lambda: sparse(1, 5.0 + own),
        "other rows": lambda: sparse(1 + 2 * collectives.rank, 5.0),
        "fewer rows": lambda: sparse(1 + collectives.rank, 0.0),
        "nothing": lambda: nn.Parameter(torch.zeros(6, 1)),
        "some nothing": lambda: sparse(1, 5.0) if own else nn.Parameter(torch.zeros(6, 1)),
    }[kind]()
    complex_one = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    complex_one.grad = torch.full((2,), 1.0 + 2.0j)
    half = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    half.grad = torch.ones(3, dtype=torch.bfloat16)
    return are_alike(local_gradients([parameter, complex_one, half]), collectives)


@pytest.mark.parametrize(
    ("kind", "alike"),
    [
        ("same", True),
        ("other values", False),
        ("other rows", False),
        ("fewer rows", False),
        ("nothing", True),
        ("some nothing", False),
    ],
)
def test_sparse_gradients_are_compared_by_values_and_rows(worlds: Any, kind: str, alike: bool) -> None:
    assert worlds(2).run(compared, kind) == [alike, alike]


def first_gradients_known_by_backward() -> tuple[bool, bool]:
    with get_strategy("ddp") as strategy:
        module = nn.Linear(2, 1)
        model = strategy.setup_module(module)
        strategy.backward(model(torch.ones(1, 2)).sum(), model)
        halves = [torch.optim.SGD([each], lr=0.1) for each in module.parameters()]
        for each in halves:
            strategy.setup_optimizer(each)
        return tuple(strategy._registry.of(module).optimizers[each].by_backward for each in halves)  # type: ignore[return-value]


def test_a_backward_before_the_optimizers_is_remembered(worlds: Any) -> None:
    assert worlds(2).run(first_gradients_known_by_backward) == [(True, True)] * 2


def assigned(values: str) -> tuple[int, str]:
    """Step gradients of no backward, having clipped them; count how many messages were sent."""
    with get_strategy("ddp") as strategy:
        module = nn.Linear(2, 1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            module, [torch.optim.SGD(module.parameters(), lr=0.1)]
        )
        for each in module.parameters():
            each.grad = torch.full_like(each, 1.0 + (strategy.global_rank if values == "apart" else 0))
        with Counted(strategy.collectives) as sent:
            try:
                strategy.clip_gradients_norm(model, optimizer, 1.0)
                strategy.optimizer_step(optimizer)
            except SetupError as error:
                return len(sent), str(error)
        return len(sent), ""


class Counted:
    """Counts reductions."""

    def __init__(self, collectives: Any) -> None:
        self._collectives, self._sent = collectives, list[Any]()

    def __enter__(self) -> list[Any]:
        own = self._collectives.all_reduce
        self._collectives.all_reduce = lambda *args, **kwargs: (self._sent.append(args), own(*args, **kwargs))[1]
        return self._sent

    def __exit__(self, *error: Any) -> None:
        del self._collectives.all_reduce


def test_gradients_are_compared_once_a_step(worlds: Any) -> None:
    assert worlds(2).run(assigned, "alike") == [(1, "")] * 2


def test_gradients_that_differ_are_refused_before_they_are_clipped(worlds: Any) -> None:
    for sent, message in worlds(2).run(assigned, "apart"):
        assert sent == 1
        assert "no strategy.backward has run" in message
