"""Units that only some ranks call are refused by all of them, and nothing hangs or is mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy


class Experts(nn.Module):
    """Two layers of one size, of which each rank may take its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, taken: int | None) -> torch.Tensor:
        x = self.inlet(x)
        return x if taken is None else self.experts[taken](x)


class Around(nn.Module):
    """Has the layers inside a unit that is not the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inside = Experts()

    def forward(self, x: torch.Tensor, taken: int | None) -> torch.Tensor:
        out: torch.Tensor = self.inside(self.first(x), taken)
        return out


Taken = tuple[int | None, int | None]


def gradients(policy: set[type[nn.Module]] | None, taken: Taken, kind: type[nn.Module] = Experts) -> Any:
    """Return the gradients where each rank takes its own, or the strategy's error."""
    with get_strategy("fsdp", auto_wrap_policy=policy) as strategy:
        strategy.seed_everything(0)
        model = kind()
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        try:
            strategy.backward(model(torch.ones(2, 4), taken[strategy.global_rank]).sum(), model)
        except SetupError as refusal:
            return str(refusal)
        return [each.flatten().tolist() for each in strategy.module_gradients(model).values() if each is not None]


@pytest.mark.parametrize("taken", [(0, 1), (0, None), (None, 1)])
def test_units_that_only_some_ranks_call_are_refused_by_all(worlds: Any, taken: Taken) -> None:
    first, second = worlds(2).run(gradients, {nn.Linear}, taken)
    assert first == second
    assert "ranks run different parts of a module" in first


@pytest.mark.parametrize("taken", [(0, 1), (0, None), (None, 1)])
def test_inside_a_unit_ranks_may_call_different_layers(worlds: Any, taken: Taken) -> None:
    torch.manual_seed(0)
    plain = Experts()
    for each in taken:
        (plain(torch.ones(2, 4), each).sum() / 2).backward()
    expected = [each.grad.flatten().tolist() for each in plain.parameters() if each.grad is not None]
    found, _ = worlds(2).run(gradients, None, taken)
    assert [pytest.approx(each, abs=1e-6) for each in expected] == found


@pytest.mark.parametrize(
    ("taken", "sentence"),
    [((0, 1), "and those of other ranks have not"), ((0, None), "have used parameters of a unit that those of others")],
)
def test_inside_other_units_they_are_refused_by_all(worlds: Any, taken: Taken, sentence: str) -> None:
    first, second = worlds(2).run(gradients, {Experts}, taken, Around)
    assert first == second
    assert sentence in first


def copies() -> str:
    """Return the error where one rank of one copy uses a layer alone, and its gradient is due before the end."""
    with get_strategy("hsdp", device_mesh=(2, 2)) as strategy:
        model = strategy.setup_module(Experts())
        x = torch.ones(2, 4, requires_grad=True)
        loss = model(x, 0 if strategy.global_rank == 0 else None).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(SetupError) as refusal:
            strategy.backward(loss + slope.square().mean(), model)
        return str(refusal.value)


def test_what_one_copy_uses_alone_is_refused_by_the_other_too(worlds: Any) -> None:
    (sentence,) = set(worlds(4).run(copies))
    assert "have used parameters of a unit that those of others" in sentence


def output_after_a_refusal() -> float:
    with get_strategy("fsdp", auto_wrap_policy={nn.Linear}, reshard_after_forward=False) as strategy:
        strategy.seed_everything(0)
        model = strategy.setup_module(Experts())
        with pytest.raises(SetupError, match="ranks run different parts"):
            model(torch.ones(2, 4), (0, None)[strategy.global_rank])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2)
        return float(model(torch.ones(2, 4), 1).sum())


def test_nothing_that_was_gathered_for_it_is_used_later(worlds: Any) -> None:
    torch.manual_seed(0)
    plain = Experts()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(2)
    assert worlds(2).run(output_after_a_refusal) == [pytest.approx(float(plain(torch.ones(2, 4), 1).sum()))] * 2
