"""Under 16-mixed all ranks agree on overflows, scales and skipped steps."""

import math
from typing import Any

import pytest
import torch

from shard_core import get_strategy
from shard_core.errors import NonFiniteGradient
from shard_core.testing import models


def overflow_on_one_rank(strategy_name: str) -> Any:
    """Train with one rank's gradient infinite in the second of four steps."""
    with get_strategy(strategy_name, precision="16-mixed") as strategy:
        strategy.seed_everything(0)
        model = models.make("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        scaler = strategy.precision.scaler
        assert scaler is not None
        story = []
        for step, batch in enumerate(models.batches("plain", 4, 12)):
            loss = model(*models.share(batch, strategy.global_rank, strategy.world_size))
            if step == 1 and strategy.global_rank == strategy.world_size - 1:
                loss = loss * math.inf
            strategy.backward(loss, model)
            norm = strategy.clip_gradients_norm(model, optimizer, 1.0)
            stepped = strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            weights = torch.cat([tensor.flatten() for _, tensor in strategy.full_parameters(model)])
            story.append((bool(norm.isfinite()), stepped, scaler.begin_backward(), weights))
        return story


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("fsdp", 3)])
def test_one_infinite_gradient_skips_the_step_everywhere(worlds: Any, strategy: str, size: int) -> None:
    stories = worlds(size).run(overflow_on_one_rank, strategy)
    for story in stories:
        assert [(finite, stepped, scale) for finite, stepped, scale, _ in story] == [
            (True, True, 65536.0),
            (False, False, 32768.0),
            (True, True, 32768.0),
            (True, True, 32768.0),
        ]
        weights = [weights for *_, weights in story]
        assert torch.equal(weights[0], weights[1]), "the skipped step changes nothing"
        assert not torch.equal(weights[1], weights[2])
        assert torch.equal(weights[3], stories[0][3][3]), "ranks hold the same weights"


def unscaled_norms(strategy_name: str, precision: str) -> list[float]:
    with get_strategy(strategy_name, precision=precision) as strategy:
        strategy.seed_everything(0)
        model = models.make("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        norms = []
        for batch in models.batches("plain", 3, 12):
            for micro in (0, 1):
                half = [tensor.chunk(2)[micro] for tensor in batch]
                loss = model(*models.share(tuple(half), strategy.global_rank, strategy.world_size)) / 2
                strategy.backward(loss, model)
            norms.append(strategy.clip_gradients_norm(model, optimizer, math.inf).item())
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return norms


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_norms_are_those_of_unscaled_gradients(worlds: Any, strategy: str, size: int) -> None:
    truth = worlds(1).run(unscaled_norms, "single", "32-true")[0]
    for norms in worlds(size).run(unscaled_norms, strategy, "16-mixed"):
        assert norms == pytest.approx(truth, rel=1e-2)


def without_scaler(strategy_name: str) -> str:
    with get_strategy(strategy_name) as strategy:
        model = models.make("plain")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        batch = models.share(models.batches("plain", 1, 12)[0], strategy.global_rank, strategy.world_size)
        loss = model(*batch)
        strategy.backward(loss * (math.nan if strategy.global_rank == 0 else 1.0), model)
        with pytest.raises(NonFiniteGradient) as error:
            strategy.clip_gradients_norm(model, optimizer, 1.0)
        assert not strategy.clip_gradients_norm(model, optimizer, 1.0, error_if_nonfinite=False).isfinite()
        return str(error.value)


@pytest.mark.parametrize(("strategy", "size"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_without_a_scaler_every_rank_raises(worlds: Any, strategy: str, size: int) -> None:
    assert all("the gradient norm is nan" in message for message in worlds(size).run(without_scaler, strategy))
