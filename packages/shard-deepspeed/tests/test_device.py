"""DeepSpeed computes on this rank's device, which LOCAL_RANK is not the number of."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from shard_core import Strategy, get_strategy
from shard_core.testing import models, oracle, set_up, step, whole_weights
from shard_deepspeed.strategy import DeepSpeedStrategy

_STEPS, _BATCH = 3, 12


class OnSecond(DeepSpeedStrategy):
    """Has the second of this host's devices, as with ``devices=[1]`` on a host of GPUs."""

    root_device = torch.device("cpu:1")


def train_on(strategy: Strategy) -> tuple[set[str], dict[str, torch.Tensor]]:
    """Train on a strategy's device; give the engine's, and the weights."""
    with strategy:
        assert strategy.local_rank == int(os.environ["LOCAL_RANK"]) != strategy.root_device.index
        model, optimizer = set_up(strategy, "plain", "adamw")
        for batch in models.batches("plain", _STEPS, _BATCH):
            step(strategy, model, optimizer, batch)
        engine = strategy._zero[strategy.unwrap(model)].engine  # type: ignore[attr-defined]
        return {str(engine.device)}, whole_weights(strategy, model)


def train_on_numbered(stage: int) -> tuple[set[str], dict[str, torch.Tensor], set[str]]:
    """Make DeepSpeed number its CPUs, as it does GPUs; torch takes any number of one."""
    from deepspeed.accelerator import cpu_accelerator, get_accelerator, set_accelerator

    asked: set[str] = set()

    class Numbered(cpu_accelerator.CPU_Accelerator):
        def device_name(self, device_index: Any = None) -> str:
            if device_index is not None:
                asked.add(f"cpu:{device_index}")
            return "cpu" if device_index is None else f"cpu:{device_index}"

        def set_device(self, device_index: Any) -> None:
            asked.add(f"cpu:{torch.device(device_index).index if 'cpu' in str(device_index) else device_index}")

    before, numbered = get_accelerator(), Numbered()
    set_accelerator(numbered)
    try:
        devices, weights = train_on(OnSecond(stage=stage, accelerator="cpu"))
        assert get_accelerator() is numbered  # put back when the strategy has ended
        return devices, weights, asked
    finally:
        set_accelerator(before)


def truth() -> dict[str, torch.Tensor]:
    trained = oracle.train(
        lambda: models.make("plain"),
        lambda module: models.make_optimizer("adamw", module),
        models.batches("plain", _STEPS, _BATCH),
    )
    return trained.weights


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_device_deepspeed_asks_for_is_this_ranks(worlds: Any, stage: int) -> None:
    ((devices, weights, asked),) = worlds(1).run(train_on_numbered, stage)
    assert devices == asked == {"cpu:1"}
    oracle.assert_same_weights(weights, truth(), 1e-6)


def train_one_after_the_other() -> list[set[str]]:
    return [train_on_numbered(3)[2], train_on_numbered(2)[2]]


def test_an_engine_after_another_has_its_own_device(worlds: Any) -> None:
    assert worlds(1).run(train_one_after_the_other) == [[{"cpu:1"}, {"cpu:1"}]]


def train_on_second_gpu(stage: int) -> tuple[set[str], dict[str, torch.Tensor], int]:
    devices, weights = train_on(get_strategy("deepspeed", stage=stage, accelerator="cuda", devices=[1]))
    return devices, weights, torch.cuda.max_memory_allocated(0)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are needed, of which the second is asked for")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_second_gpu_computes_and_the_first_holds_nothing(worlds: Any, stage: int) -> None:
    ((devices, weights, first),) = worlds(1).run(train_on_second_gpu, stage)
    assert (devices, first) == ({"cuda:1"}, 0)
    oracle.assert_same_weights(weights, truth(), 1e-4)
