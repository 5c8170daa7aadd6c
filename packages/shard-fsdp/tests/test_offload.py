"""Shards in host memory: what is there, what the engine is given, and that training is the same."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shard_core import get_strategy
from shard_core.backend import offload_policy
from shard_core.testing import models, oracle, set_up, train_under

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


def parts(name: str, accelerator: str = "cpu", **options: Any) -> Any:
    with get_strategy(name, accelerator=accelerator, **options) as strategy:
        model, optimizer = set_up(strategy, Mixed, "adamw")
        strategy.backward(model(torch.ones(2, 6, device=strategy.root_device)), model)
        strategy.clip_gradients_norm(model, optimizer, 1.0)
        strategy.optimizer_step(optimizer)
        group = model._get_fsdp_state()._fsdp_param_group
        held = [model.layer.weight, model.layer.weight.grad, optimizer.state[model.layer.weight]["exp_avg"]]
        shards = [(type(tensor), tensor.to_local().device.type, tensor.to_local().shape[0]) for tensor in held]
        return {type(group.offload_policy), *(parameter.offload_to_cpu for parameter in group.fsdp_params)}, shards


# On a CPU every tensor is in host memory, so the engine itself is asked; where tensors are only a GPU shows.
@pytest.mark.parametrize(
    ("name", "engine"), [("fsdp", {OffloadPolicy, False}), ("fsdp_cpu_offload", {CPUOffloadPolicy, True})]
)
def test_the_engine_offloads_where_it_is_asked_to(worlds: Any, name: str, engine: set[Any]) -> None:
    assert worlds(2).run(parts, name) == [(engine, [(DTensor, "cpu", rows)] * 3) for rows in (3, 2)]


def offloaded_copies() -> Any:
    return parts("hsdp", device_mesh=(1, 2), cpu_offload=True)


def test_shards_of_copies_are_offloaded_alike(worlds: Any) -> None:
    engine = {CPUOffloadPolicy, True}
    assert worlds(2).run(offloaded_copies) == [(engine, [(DTensor, "cpu", rows)] * 3) for rows in (3, 2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: on a CPU all is in host memory anyway")
@pytest.mark.parametrize(("name", "device"), [("fsdp", "cuda"), ("fsdp_cpu_offload", "cpu")])
def test_shards_gradients_and_optimizer_state_are_in_host_memory(worlds: Any, name: str, device: str) -> None:
    ((_, shards),) = worlds(1).run(parts, name, "cuda")
    assert shards == [(DTensor, device, 5)] * 3


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
