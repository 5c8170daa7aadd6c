"""Shards show how many dims their parameters have, so that users group them after setup as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from xla_environments import HASTY
from xla_stories import Plain

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle

STEPS = 3


class Odd(nn.Module):
    """Parameters of no to four dims, with fewer rows than ranks, with none, and with numbers that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.Conv2d(1, 3, 2)
        self.inner = Scaled()
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.position = nn.Parameter(torch.randn(1, 5))
        self.head = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.images(x).flatten(1)
        return self.head(self.inner(hidden) + self.position).square().mean() + self.empty.sum()


class Scaled(nn.Module):
    """A parameter without dims beside others; what is trained of it is not computed with by broadcasting alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale.shape == ()
        return torch.tanh(self.linear(x)) * torch.stack([self.scale] * 5)


def sgd(groups: Any) -> optim.Optimizer:
    return optim.SGD(groups, lr=0.1, momentum=0.9)


def adamw(groups: Any) -> optim.Optimizer:
    return optim.AdamW(groups, lr=1e-2)


def nadam(groups: Any) -> optim.Optimizer:
    return optim.NAdam(groups, lr=1e-2)  # counts in numbers that look like state of a parameter without dims


def trained(strategy: Any, make: Any) -> tuple[list[int], list[float], dict[str, torch.Tensor]]:
    """Train with the groups that everyone makes, and one of what has no dims; the optimizer is made after setup."""
    torch.manual_seed(0)
    model, _ = strategy.setup_module_and_optimizers(Odd(), [])
    parameters = list(model.parameters())
    groups = [
        {"params": [each for each in parameters if each.ndim >= 2], "weight_decay": 0.3},
        {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0},
        {"params": [each for each in parameters if each.ndim == 0], "weight_decay": 0.0, "lr": 0.05},
    ]
    optimizer = make(groups)
    if not isinstance(strategy, Plain):
        optimizer = strategy.setup_optimizer(optimizer)
    inputs, norms = torch.randn(STEPS, 12, 1, 3, 3, generator=torch.Generator().manual_seed(1)), []
    for number, batch in enumerate(inputs):
        share = batch if isinstance(strategy, Plain) else batch[strategy.global_rank :: strategy.world_size]
        share = share if isinstance(strategy, Plain) else strategy.batch_to_device(share)
        if number == 1:
            with strategy.no_backward_sync(model):
                strategy.backward(model(share), model)
        strategy.backward(model(share), model)
        norms.append(float(strategy.clip_gradients_norm(model, optimizer, 1.0)))
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    return [each.ndim for each in parameters], norms, strategy.module_state_dict(model)


def trained_on_ranks(options: dict[str, Any], make: Any) -> Any:
    with get_strategy("xla_fsdp", accelerator="xla", **options) as strategy:
        return trained(strategy, make)


@pytest.mark.parametrize("make", [sgd, adamw, nadam])
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, {}, id="1"),
        pytest.param(2, {}, id="2"),
        pytest.param(3, {"auto_wrap_policy": {Scaled}, "coalesce_all_gather_ops": True}, id="3-coalesced-units"),
        pytest.param(2, {"reshard_after_forward": False, "disable_reshard_on_root": False}, id="2-not-resharded"),
    ],
)
def test_groups_made_after_setup_train_as_in_plain_pytorch(
    worlds: Any, ranks: int, options: dict[str, Any], make: Any
) -> None:
    true_dims, true_norms, true_weights = trained(Plain(), make)
    for rank, (dims, norms, weights) in enumerate(worlds(ranks, HASTY).run(trained_on_ranks, options, make)):
        assert sorted(dims) == sorted(true_dims)
        oracle.assert_same_numbers("norm", norms, true_norms, 1e-5)
        if rank == 0:
            oracle.assert_same_weights(weights, true_weights, 1e-5)


def refused_by_elements() -> str:
    try:
        trained_on_ranks({"shard_param_on_dim_0": False}, sgd)
    except SetupError as error:
        return str(error)
    return "nothing was refused"


def test_flat_shards_show_no_dims(worlds: Any) -> None:
    for message in worlds(2, HASTY).run(refused_by_elements):
        assert "has several groups of parameters that setup has flattened" in message
