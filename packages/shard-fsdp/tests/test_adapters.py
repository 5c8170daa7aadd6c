"""Frozen weights beside trained ones: only what is trained has gradients, state and traffic."""

from typing import Any

import pytest
import torch
from torch import nn
from wire import Wire

from shard_core import SetupError, get_strategy
from shard_core.backend import local_part

WIDTH, RANK = 64, 2


class Adapted(nn.Module):
    """A frozen layer and a trained detour of low rank, as LoRA has it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.frozen(x) + self.up(self.down(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def inputs(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * WIDTH).reshape(2, WIDTH) * (rank + 1)


def make() -> tuple[Model, torch.optim.Optimizer]:
    model = Model()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)


def fine_tune(options: dict[str, Any]) -> tuple[dict[str, torch.Tensor], int, int, set[str]]:
    """Train two steps; give the weights, elements sent in a backward, elements of gradients, and who has one."""
    with get_strategy("fsdp", **options) as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            model, optimizer = make()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(inputs(strategy.global_rank))
            with Wire() as wire:
                strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        held = sum(local_part(gradient).numel() for gradient in gradients.values())
        return (
            {name: tensor.clone() for name, tensor in strategy.full_parameters(model)},
            wire.scattered,
            held,
            set(gradients),
        )


@pytest.mark.parametrize("options", [{}, {"unit_bytes": 1}, {"auto_wrap_policy": {Adapted}}])
def test_only_what_is_trained_is_reduced(worlds: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain, optimizer = make()
    for _ in range(2):
        optimizer.zero_grad()
        for rank in range(2):
            (plain(inputs(rank)) / 2).backward()
        optimizer.step()
    trained = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    elements = sum(parameter.numel() for parameter in plain.parameters() if parameter.requires_grad)
    for weights, sent, held, having in worlds(2).run(fine_tune, options):
        assert sent == elements // 2, "the other rank's half"
        assert held == elements // 2
        assert having == trained
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(weights[name], parameter, rtol=1e-5, atol=1e-6, msg=name)
            assert name in trained or torch.equal(weights[name], parameter)


class Int8Params(nn.Parameter):
    """What bitsandbytes calls its eight-bit weights."""

    __module__ = "bitsandbytes.nn.modules"


def test_a_quantised_base_is_refused_by_name() -> None:
    model = Adapted()
    model.frozen.weight = Int8Params(torch.zeros(WIDTH, WIDTH, dtype=torch.int8), requires_grad=False)
    with (
        get_strategy("fsdp", accelerator="cpu") as strategy,
        pytest.raises(SetupError, match=r"'frozen\.weight' is Int8Params of bitsandbytes, and no strategy keeps"),
    ):
        strategy.setup_module(model)
