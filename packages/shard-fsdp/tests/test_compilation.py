"""Compiling block by block: one graph serves all blocks of a class, and training stays what it is."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import InvalidOption, get_strategy


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x)))


class Inlet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = Inlet()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Graphs:
    """A backend of torch.compile that runs what it is given and counts it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        del inputs
        self.count += 1
        return graph.forward


def train(options: dict[str, Any], compiled: bool) -> tuple[list[float], int, set[str]]:
    torch.compiler.reset()
    graphs = Graphs()
    if compiled:
        options = {**options, "compile": {"backend": graphs, "fullgraph": True}}
    with get_strategy("fsdp", **options) as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        losses = []
        for _ in range(3):
            loss = model(torch.ones(2, 6))
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, graphs.count, {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, 1),
        ({"unit_bytes": 1}, 1),
        ({"auto_wrap_policy": {Inlet, Block}}, 2),
        ({"unit_bytes": 1, "activation_checkpointing": Block}, 1),
    ],
)
def test_there_is_one_graph_for_each_class_of_blocks(worlds: Any, options: dict[str, Any], graphs: int) -> None:
    plain = worlds(2).run(train, options, False, timeout=120.0)
    for (losses, count, names), (truth, _, own) in zip(
        worlds(2).run(train, options, True, timeout=120.0), plain, strict=True
    ):
        assert losses == truth
        assert count == graphs
        assert names == own


def whole() -> int:
    torch.compiler.reset()
    graphs = Graphs()
    with get_strategy("fsdp", compile={"backend": graphs}) as strategy:
        model = strategy.setup_module(Block())
        model(torch.ones(2, 6))
        return graphs.count


def test_a_model_without_blocks_is_compiled_whole(worlds: Any) -> None:
    assert worlds(2).run(whole, timeout=120.0) == [1, 1]


@pytest.mark.parametrize("value", ["inductor", 1, None])
def test_what_compile_cannot_be_gets_a_sentence(value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"compile is .*; give True, False, or arguments of torch.compile"):
        get_strategy("fsdp", compile=value)


@torch.compiler.disable
def in_python(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x)


class Left(nn.Module):
    """Layers of which torch's compiler may leave the first to Python."""

    def __init__(self, left: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.left = left

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(torch.tanh(in_python(self.first, x) if self.left else self.first(x)))


def loss_of_step(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.ones(2, 6) * (step + rank)
    loss: torch.Tensor = model(x).square().mean() + model(x + 1).square().mean()
    return loss


def in_plain_pytorch() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    model = Left(left=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[list[float]] = [[], []]
    for step in range(3):
        of_ranks = [loss_of_step(model, step, rank) for rank in range(2)]
        (sum(of_ranks) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        for mine, loss in zip(losses, of_ranks, strict=True):
            mine.append(float(loss.detach()))
    return losses, model.state_dict()


def losses_of_two_forwards(left_on: tuple[int, ...]) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.compiler.reset()
    with get_strategy("fsdp", accelerator="cpu") as strategy:
        model = Left(strategy.global_rank in left_on)
        model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        losses = []
        for step in range(3):
            loss = loss_of_step(model, step, strategy.global_rank)
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses, strategy.module_state_dict(model)


@pytest.mark.parametrize(
    "left_on", [pytest.param((0, 1), id="everywhere", marks=pytest.mark.long), pytest.param((0,), id="on one rank")]
)
def test_what_the_compiler_leaves_to_python_is_inside_the_forward(worlds: Any, left_on: tuple[int, ...]) -> None:
    found = worlds(2).run(losses_of_two_forwards, left_on, timeout=60)
    plain_losses, plain_weights = in_plain_pytorch()
    assert [losses for losses, _ in found] == [pytest.approx(each, rel=1e-5) for each in plain_losses]
    for name, each in plain_weights.items():
        torch.testing.assert_close(found[0][1][name], each)
