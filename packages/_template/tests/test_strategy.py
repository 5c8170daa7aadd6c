"""What sets this strategy apart: one average over every module, whatever the loss came through."""

from typing import Any

import pytest
import torch

from shard_core import InvalidOption, get_strategy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"send_buffers": "no"}, "send_buffers is 'no'; give True or False"),
        ({"send_bufers": True}, "has no option 'send_bufers'; did you mean 'send_buffers'"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        get_strategy("template", **options)


def gradients_of_a_chain() -> list[float]:
    with get_strategy("template", accelerator="cpu") as strategy:
        first, second = (torch.nn.Linear(1, 1, bias=False) for _ in range(2))
        for module in (first, second):
            torch.nn.init.ones_(module.weight)
        first, second = strategy.setup_module(first), strategy.setup_module(second)
        sample = torch.full((1, 1), float(strategy.global_rank))
        strategy.backward(second(first(sample)).sum(), second)
        return [first.weight.grad.item(), second.weight.grad.item()]


def test_every_module_a_loss_came_through_is_averaged(worlds: Any) -> None:
    assert worlds(2).run(gradients_of_a_chain) == [[0.5, 0.5], [0.5, 0.5]]


def gradient_of_one_rank() -> float:
    with get_strategy("template", accelerator="cpu") as strategy:
        towers = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
        towers = strategy.setup_module(towers)
        tower = towers[strategy.global_rank]
        strategy.backward(tower(torch.ones(1, 1)).sum(), towers)
        return float(towers[0].bias.grad)


def test_what_one_rank_did_not_reach_counts_as_zero_there(worlds: Any) -> None:
    assert worlds(2).run(gradient_of_one_rank) == [0.5, 0.5]


@pytest.mark.parametrize(("send_buffers", "expected"), [(True, [0.0, 0.0]), (False, [0.0, 0.1])])
def test_buffers_are_sent_on_request(worlds: Any, send_buffers: bool, expected: list[float]) -> None:
    assert worlds(2).run(running_mean, send_buffers) == pytest.approx(expected)


def running_mean(send_buffers: bool) -> float:
    with get_strategy("template", accelerator="cpu", send_buffers=send_buffers) as strategy:
        norm = strategy.setup_module(torch.nn.BatchNorm1d(1))
        strategy.backward(norm(torch.full((2, 1), float(strategy.global_rank))).sum(), norm)
        return float(norm.running_mean)
