"""A small model under a strategy or in plain PyTorch, and what is done to it call by call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from xla_environments import HASTY, spread_over

from shard_core.testing import models

FSDP: tuple[str, int, dict[str, str]] = ("xla_fsdp", 2, HASTY)
SPMD: tuple[str, int, dict[str, str]] = ("xla_spmd", 1, spread_over(4))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + torch.tanh(self.linear(inputs))


class Net(nn.Module):
    """A unit of its own between parameters of the root, and a penalty where weights are whole: in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.block = Block()
        self.head = nn.Linear(6, 3)
        self.skips = False
        self.hooked: list[Any] = []

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        loss = nn.functional.mse_loss(self.head(hidden if self.skips else self.block(hidden)), targets)
        return loss + 0.1 * self.first.weight.norm()


class Plain:
    """The members of a strategy that the stories below need, in plain PyTorch."""

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Any]) -> tuple[nn.Module, list[Any]]:
        return module, optimizers

    def unwrap(self, module: nn.Module) -> nn.Module:
        return module

    def no_backward_sync(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def backward(self, loss: torch.Tensor, module: nn.Module, **kwargs: Any) -> None:
        loss.backward(**kwargs)

    def clip_gradients_norm(self, module: nn.Module, optimizer: optim.Optimizer, max_norm: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], max_norm)

    def optimizer_step(self, optimizer: optim.Optimizer) -> None:
        optimizer.step()

    def module_state_dict(self, module: nn.Module) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, momentum=0.9)


class Story:
    """A model under a strategy or in plain PyTorch, and what was measured of it."""

    def __init__(self, strategy: Any, make: Callable[[Any], optim.Optimizer], start: Any = Net.parameters) -> None:
        torch.manual_seed(0)
        net = Net()
        self.strategy = strategy
        self.model, (self.optimizer,) = strategy.setup_module_and_optimizers(net, [make(start(net))])
        self.net = strategy.unwrap(self.model)
        self.norms: list[float] = []
        self._batches = iter(models.batches("plain", 18, 12))

    def loss(self) -> torch.Tensor:
        batch = next(self._batches)
        inputs, targets = batch if isinstance(self.strategy, Plain) else models.share_of(self.strategy, batch)
        return self.model(inputs, targets)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self.strategy.backward(loss, self.model, **kwargs)

    def step(self) -> None:
        self.norms.append(float(self.strategy.clip_gradients_norm(self.model, self.optimizer, 100.0)))
        self.strategy.optimizer_step(self.optimizer)
        self.optimizer.zero_grad()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.backward(self.loss())
            self.step()
