"""Weights that are drawn after setup are those of plain PyTorch, also where their values are spread over ranks."""

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import oracle, set_up, whole_weights


def draw_anew(module: nn.Module, rank: int) -> None:
    torch.manual_seed(3 + rank)
    for layer in module.children():
        layer.reset_parameters()
    nn.init.orthogonal_(module[0].weight)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 5))


def drawn_anew(stage: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Draw weights after setup; return them, and what this rank computes with them."""
    options: dict[str, Any] = {"param_persistence_threshold": 0} if stage == 3 else {}
    with get_strategy("deepspeed", stage=stage, **options) as strategy:
        model, _ = set_up(strategy, layers, "sgd")
        strategy.backward(model(torch.ones(2, 6)).sum(), model)
        draw_anew(model, strategy.global_rank)
        return whole_weights(strategy, model), model(torch.ones(2, 6)).detach()


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_drawn_after_setup_are_those_of_rank_zero(worlds: Any, stage: int) -> None:
    model = layers()
    draw_anew(model, 0)
    for weights, output in worlds(2).run(drawn_anew, stage):
        oracle.assert_same_weights(weights, model.state_dict(), 0.0)
        assert torch.equal(output, model(torch.ones(2, 6)))
