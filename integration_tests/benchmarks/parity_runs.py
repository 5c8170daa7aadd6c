"""What the table of parity_table.py is made of: the models, and one training run of each."""

from __future__ import annotations

from typing import Any

import hugging_face
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.parity.batch import loss_of as loss_of_call
from shard_core.parity.batch import part_of
from shard_core.testing import models, oracle
from shard_core.testing.training import set_up

#: By name, the heading of the model's column.
MODELS = {"gpt": "GPT, tied", "llama": "Llama", "qwen3": "Qwen3", "gpt_neox": "GPT-NeoX", "gpt2": "GPT-2"}
OPTIMIZERS = ("adamw", "sgd")
BATCH, CLIP = 12, 1.0


def make(model: str) -> nn.Module:
    return models.make("gpt") if model == "gpt" else hugging_face.make(model)


def make_optimizer(optimizer: str, module: nn.Module) -> torch.optim.Optimizer:
    """Build it as people do: what is no matrix does not decay, and learns at a rate of its own."""
    groups = [
        {"params": [p for p in module.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.ndim < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    if optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=1e-3)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def batches(model: str, steps: int) -> list[dict[str, Any]]:
    if model == "gpt":
        return [{"inputs": inputs, "targets": targets} for inputs, targets in models.batches("gpt", steps, BATCH)]
    return hugging_face.batches(model, steps, BATCH)


def train_plainly(model: str, optimizer: str, steps: int) -> oracle.Trajectory:
    return oracle.train(
        lambda: make(model),
        lambda module: make_optimizer(optimizer, module),
        batches(model, steps),
        loss_of=loss_of_call,
        clip=CLIP,
    )


def train_under(name: str, options: dict[str, Any], model: str, optimizer: str, steps: int) -> oracle.Trajectory | None:
    """Train on this rank's share of the same batches; return the run on rank 0."""
    with get_strategy(name, **options) as strategy:
        module, stepped = set_up(strategy, lambda: make(model), lambda built: make_optimizer(optimizer, built))
        data = strategy.distributed_sampler_kwargs
        losses, norms = [], []
        for batch in batches(model, steps):
            share = strategy.batch_to_device(part_of(batch, data["rank"], data["num_replicas"]))
            loss = loss_of_call(module, share)
            strategy.backward(loss, module)
            norms.append(float(strategy.clip_gradients_norm(module, stepped, CLIP)))
            assert strategy.optimizer_step(stepped)
            stepped.zero_grad()
            losses.append(float(strategy.all_reduce(loss.detach())))
        weights = strategy.module_state_dict(module)
        return oracle.Trajectory(losses=losses, norms=norms, weights=weights) if strategy.is_global_zero else None
