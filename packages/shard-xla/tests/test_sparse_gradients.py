"""Embeddings made with ``sparse=True`` train as in plain PyTorch, under optimizers that step sparse gradients there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from xla_stories import FSDP, SPMD, Plain

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle

STEPS = 4


class Words(nn.Module):
    """An embedding and a bag of them, with rows that no batch has; the rows of one batch come back in later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(11, 4, sparse=True, padding_idx=2)
        self.bag = nn.EmbeddingBag(7, 4, sparse=True)
        self.head = nn.Linear(4, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.single(tokens).mean(1) + self.bag(tokens % 7)
        return self.head(hidden).square().mean()


def momentum(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.3, momentum=0.9)


def sgd(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.3, maximize=True)


def adagrad(parameters: Any) -> optim.Optimizer:
    return optim.Adagrad(parameters, lr=0.3, lr_decay=0.1)


OPTIMIZERS = (sgd, momentum, adagrad)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3 * (number % 2), 5 + number, (4, 3), generator=generator) for number in range(STEPS)]


def trained(strategy: Any, make: Callable[[Any], optim.Optimizer]) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Words()
    model, (optimizer,) = strategy.setup_module_and_optimizers(model, [make(model.parameters())])
    steps = []
    for batch in batches():
        if not isinstance(strategy, Plain):
            batch = strategy.batch_to_device(batch[strategy.global_rank :: strategy.world_size])
        strategy.backward(model(batch), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
        steps.append(strategy.module_state_dict(model))
    return steps


def all_trained(strategy_name: str) -> list[list[dict[str, torch.Tensor]]]:
    with get_strategy(strategy_name, accelerator="xla") as strategy:
        return [trained(strategy, make) for make in OPTIMIZERS]


STRATEGIES = pytest.mark.parametrize("strategy", [FSDP, SPMD], ids=["xla_fsdp", "xla_spmd"])


@STRATEGIES
def test_sparse_embeddings_train_as_in_plain_pytorch(worlds: Any, strategy: Any) -> None:
    name, ranks, environment = strategy
    first, *_ = worlds(ranks, environment).run(all_trained, name, timeout=240)
    for make, steps in zip(OPTIMIZERS, first, strict=True):
        for mine, truth in zip(steps, trained(Plain(), make), strict=True):
            oracle.assert_same_weights(mine, truth, 1e-5)


def adamw(parameters: Any) -> optim.Optimizer:
    return optim.AdamW(parameters, lr=0.1)


def decaying(parameters: Any) -> optim.Optimizer:
    return optim.SGD(parameters, lr=0.1, weight_decay=0.1)


def without_eps(parameters: Any) -> optim.Optimizer:
    return optim.Adagrad(parameters, lr=0.1, eps=0.0)


def decaying_later(strategy: Any) -> None:
    model = Words()
    optimizer = sgd(model.parameters())
    model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
    optimizer.param_groups[0]["weight_decay"] = 0.1
    strategy.backward(model(strategy.batch_to_device(batches()[0])), model)
    strategy.optimizer_step(optimizer)


def late(strategy: Any) -> None:
    strategy.setup_optimizer(adamw(strategy.setup_module(Words()).parameters()))


def frozen(strategy: Any) -> None:
    """Train the rest by an optimizer that would step no sparse gradients."""
    model = Words()
    model.single.requires_grad_(False)
    model.bag.requires_grad_(False)
    strategy.setup_module_and_optimizers(model, [adamw(model.parameters())])


def refusals(strategy_name: str) -> list[str]:
    messages = []
    with get_strategy(strategy_name, accelerator="xla") as strategy:
        acts = [*((lambda _, make=make: trained(strategy, make)) for make in (adamw, decaying, without_eps))]
        for act in (*acts, decaying_later, late, frozen):
            try:
                act(strategy)
                messages.append("no error")
            except SetupError as error:
                messages.append(str(error))
    return messages


@STRATEGIES
def test_optimizers_that_step_no_sparse_gradients_are_refused(worlds: Any, strategy: Any) -> None:
    name, ranks, environment = strategy
    for *refused, accepted in worlds(ranks, environment).run(refusals, name, timeout=240):
        for message in refused:
            assert "was made with sparse=True" in message
            assert "take SGD or Adagrad without weight decay" in message
        assert accepted == "no error"
