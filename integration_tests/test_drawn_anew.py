"""Parameters that are drawn anew after setup have plain PyTorch's values, however they are spread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.errors import RankFailed
from shard_core.testing import oracle

PLAN = {"1": "colwise", "3": "rowwise"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "units": ("fsdp", {"unit_bytes": 1}),
    "copies": ("hsdp", {"data_parallel_size": 2}),
    "offloaded": ("fsdp_cpu_offload", {}),
    "split": ("tp", {"tensor_parallel_size": 2, "plan": PLAN}),
    "stage 1": ("deepspeed_stage_1", {}),
    "stage 3": ("deepspeed_stage_3", {}),
}


class Scaled(nn.Module):
    """A scale without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv1d(5, 5, 1), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), Scaled())
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def draw(model: Any) -> None:
    model[1].reset_parameters()
    nn.init.orthogonal_(model[3].weight)
    nn.init.trunc_normal_(model[3].bias, std=0.2)
    nn.init.dirac_(tensor=model[0].weight)
    nn.init.uniform_(model[4].scale)
    nn.init.sparse_(model[1].weight, sparsity=0.3)


def batches() -> list[torch.Tensor]:
    return [torch.linspace(-1, number, 120).reshape(4, 5, 6).sin() for number in range(1, 4)]


def train(layout: str) -> dict[str, torch.Tensor]:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model, optimizer = build()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        data = strategy.distributed_sampler_kwargs
        for number, x in enumerate(batches()):
            if number == 1:
                draw(strategy.unwrap(model))
            share = x.tensor_split(data["num_replicas"])[data["rank"]]
            strategy.backward(model(share).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_drawn_anew_is_drawn_as_in_plain_pytorch(worlds: Any, layout: str) -> None:
    model, optimizer = build()
    for number, x in enumerate(batches()):
        if number == 1:
            draw(model)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: tensor.detach() for name, tensor in model.named_parameters()}
    for weights in worlds(2).run(train, layout):
        oracle.assert_same_weights(weights, expected, 1e-5)


def seeded(name: str) -> torch.Tensor:
    with get_strategy(name, accelerator="cpu") as strategy:
        model, _ = build()
        model = strategy.setup_module(model)
        with torch.no_grad():
            strategy.unwrap(model)[1].weight.data.normal_(0, 0.5)
        return dict(strategy.full_parameters(model))["1.weight"].clone()


def test_shards_draw_whole_tensors_by_their_own_methods(worlds: Any) -> None:
    model, _ = build()
    expected = model[1].weight.data.normal_(0, 0.5)
    for weight in worlds(2).run(seeded, "fsdp"):
        assert torch.equal(weight, expected)


def draw_attention(attention: nn.MultiheadAttention) -> None:
    """Draw by functions that torch's own layer has imported by name, and into data and a part of them."""
    attention._reset_parameters()
    nn.init.xavier_uniform_(attention.out_proj.weight)
    nn.init.normal_(attention.in_proj_weight.data[:, 2:4])
    nn.init.uniform_(attention.out_proj.bias.data, -1.0)


def apart() -> dict[str, torch.Tensor]:
    with get_strategy("ddp", accelerator="cpu") as strategy:
        torch.manual_seed(3)
        attention = strategy.setup_module(nn.MultiheadAttention(6, 2))
        torch.manual_seed(10 + strategy.global_rank)
        draw_attention(strategy.unwrap(attention))
        return {name: tensor.clone() for name, tensor in strategy.full_parameters(attention)}


def test_ranks_with_other_generators_take_what_rank_0_draws(worlds: Any) -> None:
    torch.manual_seed(3)
    attention = nn.MultiheadAttention(6, 2)
    torch.manual_seed(10)
    draw_attention(attention)
    for weights in worlds(2).run(apart):
        oracle.assert_same_weights(weights, dict(attention.named_parameters()), 0.0)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "offloaded", "stage 1", "stage 3"])
def test_one_rank_draws_whole_tensors_too(worlds: Any, layout: str) -> None:
    (alone,), (first, _) = (worlds(size).run(train, layout, timeout=120.0) for size in (1, 2))
    oracle.assert_same_weights(alone, first, 1e-5)


def draw_away() -> None:
    with get_strategy("deepspeed_stage_3", accelerator="cpu", param_persistence_threshold=0) as strategy:
        layer = nn.Linear(4, 4)
        model, _ = strategy.setup_module_and_optimizers(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)])
        nn.init.normal_(model.weight)


@pytest.mark.parametrize("size", [1, 2])
def test_what_is_away_is_not_drawn_in_silence(worlds: Any, size: int) -> None:
    with pytest.raises(RankFailed, match=r"normal_\(\) was given a parameter whose values are spread over ranks"):
        worlds(size).run(draw_away)
