"""Shards in host memory: what is there, what the engine is told, and that training is the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shard_core import get_strategy
from shard_core.testing import models, oracle, set_up, train_under
from shard_fsdp.offload import offload_policy

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("option", "device", "pinned"),
    [
        (True, CUDA, True),
        (CPUOffload(offload_params=True), CUDA, True),
        (CPUOffloadPolicy(), CUDA, True),
        (CPUOffloadPolicy(pin_memory=False), CUDA, False),
        (True, CPU, False),
        (CPUOffloadPolicy(pin_memory=True), CPU, False),
    ],
)
def test_memory_is_pinned_where_there_is_a_device_to_copy_to(option: Any, device: torch.device, pinned: bool) -> None:
    assert offload_policy(option, device) == CPUOffloadPolicy(pin_memory=pinned)


@pytest.mark.parametrize("option", [None, False, CPUOffload(), CPUOffload(offload_params=False), OffloadPolicy()])
def test_words_for_no_offloading_mean_it(option: Any) -> None:
    assert offload_policy(get_strategy("fsdp", cpu_offload=option).config.cpu_offload, CUDA) is None


class Mixed(nn.Module):
    """Parameters that are sharded, one that is not, and a buffer."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 5)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * self.scale * self.gain).pow(2).mean()


def parts(name: str) -> Any:
    with get_strategy(name) as strategy:
        model, optimizer = set_up(strategy, Mixed, "adamw")
        strategy.backward(model(torch.ones(2, 6)), model)
        strategy.clip_gradients_norm(model, optimizer, 1.0)
        strategy.optimizer_step(optimizer)
        held = [model.layer.weight, model.layer.weight.grad, optimizer.state[model.layer.weight]["exp_avg"]]
        return [(type(tensor), tensor.to_local().device.type, tensor.to_local().shape[0]) for tensor in held]


def test_shards_gradients_and_optimizer_state_are_in_host_memory(worlds: Any) -> None:
    first, second = worlds(2).run(parts, "fsdp_cpu_offload")
    assert first == [(DTensor, "cpu", 3)] * 3
    assert second == [(DTensor, "cpu", 2)] * 3


def train(options: dict[str, Any]) -> Any:
    return train_under("fsdp_cpu_offload", options, "gpt", "adamw", steps=4, accumulate=2, clip=0.5)


def test_training_is_the_same(worlds: Any) -> None:
    truth = oracle.train(
        lambda: models.make("gpt"),
        lambda module: models.make_optimizer("adamw", module),
        models.batches("gpt", 8, 12),
        accumulate=2,
        clip=0.5,
    )
    oracle.assert_same(worlds(2).run(train, {})[0], truth)
