"""Functions of torch's that clip a module's gradients clip as in plain PyTorch, though each rank has parts of them."""

from __future__ import annotations

import functools
import gc
import math
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from scaled import Scaled
from torch import nn

from shard_core import CollectiveError, SetupError, get_strategy
from shard_core.testing import models, oracle, set_up, whole_weights

_STEPS, _BATCH = 3, 12


def of_each(model: nn.Module) -> torch.Tensor:
    """Scale each gradient by its own norm, as layer-wise rates do."""
    norms = [parameter.grad.norm() for parameter in model.parameters()]  # type: ignore[union-attr]
    for parameter, norm in zip(model.parameters(), norms, strict=True):
        parameter.grad.div_(1 + norm)  # type: ignore[union-attr]
    return torch.stack(norms)


def by_value(model: nn.Module) -> torch.Tensor:
    nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=True)
    return torch.zeros(())


def by_total(model: nn.Module) -> torch.Tensor:
    """Clip in two parts, as several modules are clipped by one norm."""
    total = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    nn.utils.clip_grads_with_norm_(model.parameters(), 0.02, total)
    return total


def rms(model: nn.Module) -> torch.Tensor:
    """Clip each gradient to a root mean square, and pass those by that have no elements."""
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.numel():
            gradient.div_(1 + gradient.norm() / gradient.numel() ** 0.5)
    return torch.zeros(())


CLIPS: dict[str, Callable[[nn.Module], torch.Tensor]] = {
    **{
        f"{norm_type}": lambda model, p=norm_type: nn.utils.clip_grad_norm_(model.parameters(), 0.02, p)
        for norm_type in (1.0, 2.0, math.inf)
    },
    "foreach": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=True),
    "each": of_each,
    "value": by_value,
    "total": by_total,
    "rms": rms,
}


def make(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def plain(clip: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, norms = Scaled(), []
    optimizer = make(model.parameters())
    for batch in models.batches("plain", _STEPS, _BATCH):
        optimizer.zero_grad()
        model(*batch).backward()
        norms.append(CLIPS[clip](model))
        optimizer.step()
    return norms, model.state_dict()


def train(stage: int, clips: list[str]) -> dict[str, Any]:
    found = {}
    for clip in clips:
        with get_strategy("deepspeed", stage=stage, **_AWAY.get(stage, {})) as strategy:
            model, optimizer = set_up(strategy, Scaled, lambda module: make(module.parameters()))
            norms = []
            for batch in models.batches("plain", _STEPS, _BATCH):
                optimizer.zero_grad()
                strategy.backward(model(*models.share_of(strategy, batch)), model)
                norms.append(CLIPS[clip](strategy.unwrap(model)))
                strategy.optimizer_step(optimizer)
            found[clip] = norms, whole_weights(strategy, model)
    return found


_AWAY: dict[int, dict[str, Any]] = {3: {"param_persistence_threshold": 0}}


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2)), 1, 3])
def test_norms_and_clipped_steps_are_those_of_plain_pytorch(worlds: Any, stage: int) -> None:
    for found in worlds(2).run(train, stage, list(CLIPS), timeout=120):
        for clip, (norms, weights) in found.items():
            true_norms, truth = plain(clip)
            torch.testing.assert_close(norms, true_norms, rtol=1e-5, atol=1e-7)
            oracle.assert_same_weights(weights, truth, 1e-5)


def refused(stage: int) -> list[str]:
    messages = []
    with get_strategy("deepspeed", stage=stage, **_AWAY.get(stage, {})) as strategy:
        model, optimizer = set_up(strategy, Scaled, lambda module: make(module.parameters()))
        own: Any = strategy.unwrap(model)
        share = models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])
        strategy.backward(model(*share), model, denominator=2)
        messages.append(refusal(functools.partial(nn.utils.clip_grad_norm_, list(own.parameters()), 1.0)))
        optimizer.zero_grad()
        strategy.backward(model(*share), model)  # from here on nothing waits, so each is refused for itself
        gradient = own.first.weight.grad
        assert gradient.norm() > 0
        for dims in (0, 1, (0, 1), [0, 3]):
            messages.append(refusal(lambda dims=dims: gradient.norm(dim=dims)))
        messages.append(refusal(lambda: torch.linalg.norm(gradient, 2)))
        messages.append(refusal(lambda: torch.linalg.vector_norm(gradient, 0)))
        optimizer.zero_grad()
        messages.append(refusal(lambda: gradient.norm()))
        strategy.backward(model(*share), model)
        messages.append(refusal(lambda: gradient.norm()))
        gradient = own.first.weight.grad
        if stage == 1:
            with strategy.no_backward_sync(model):
                strategy.backward(model(*share), model)
            messages.append(refusal(lambda: gradient.norm()))
    left = refusal(lambda: gradient.norm())
    assert "teardown" in left or "clip_gradients_norm" in left
    kept = weakref.ref(strategy)
    del strategy, model, own, optimizer
    gc.collect()
    assert kept() is None, "who keeps a gradient does not keep the strategy"
    return messages


def refusal(read: Callable[[], object]) -> str:
    with pytest.raises(SetupError) as error:
        read()
    return str(error.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_norms_that_would_be_others_are_refused(worlds: Any, stage: int) -> None:
    for messages in worlds(2).run(refused, stage):
        assert "divided by denominators" in messages[0]
        assert all("strategy.clip_gradients_norm" in message for message in messages)


def alone() -> str:
    with get_strategy("deepspeed", stage=1, guard_timeout=timedelta(seconds=5)) as strategy:
        model, _ = set_up(strategy, Scaled, lambda module: make(module.parameters()))
        strategy.backward(model(*models.share_of(strategy, models.batches("plain", 1, _BATCH)[0])), model)
        own: Any = strategy.unwrap(model)
        ask = own.first.weight.grad.norm if strategy.is_global_zero else functools.partial(strategy.barrier, "log")
        with pytest.raises(CollectiveError) as error:
            ask()
        return str(error.value)


def test_a_norm_that_one_rank_asks_for_alone_is_named(worlds: Any) -> None:
    for message in worlds(2).run(alone):
        assert "the norm of the gradient of 'first.weight'" in message
