"""Optional promises about optimizers: what is declared works, what is not is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from shard_core.capability import Capability
from shard_core.errors import SetupError
from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH, Run, assert_like, device_of, plainly, train
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 3

Weights = dict[str, torch.Tensor]


class Optimizers(Suite):
    """Optional promises about optimizers: what is declared works, what is not is refused."""

    @promise(needs=Capability.SEVERAL_MODULES, after=("averages_gradients",))
    def test_two_models(self, ranks: Ranks) -> None:
        """Two modules with an optimizer each train in turn, one through the other, as adversaries do.

        Usual cause:
            State is kept per strategy instead of per module: the second setup replaces the first, or a backward
            through both leaves the other's gradients half averaged.
        """
        generator, critic = _adversaries_plainly()
        for mine in ranks.run(train_adversaries):
            oracle.assert_same_weights(mine[0], generator, 1e-6)
            oracle.assert_same_weights(mine[1], critic, 1e-6)

    @promise(needs=Capability.SEVERAL_MODULES, after=("two_models", "step_inside_is_refused"), every_size=False)
    def test_modules_wait_apart(self, ranks: Ranks) -> None:
        """A module whose gradients wait is stepped, after another's backward, with averaged gradients or not at all.

        Usual cause:
            That a backward was deferred is noted for the strategy, so that any other ends the wait, and each rank
            steps with its own gradients.
        """
        for refused, weights in ranks.run(train_while_one_waits):
            oracle.assert_same_weights(weights, _waiting_plainly(2 if refused else 1), 1e-6)

    @promise(needs=Capability.MULTIPLE_OPTIMIZERS, after=("averages_gradients",))
    def test_two_optimizers(self, ranks: Ranks) -> None:
        """Two optimizers over the halves of one module step at rates of their own.

        Usual cause:
            Only the first optimizer is pointed at the new parameters, or a step clears the gradients that the
            other has yet to use.
        """
        truth = _halves_plainly()
        for weights in ranks.run(train_halves):
            oracle.assert_same_weights(weights, truth, 1e-5)

    @promise(needs=Capability.CLOSURE, after=("averages_gradients",))
    def test_closure_is_evaluated_again(self, ranks: Ranks) -> None:
        """An optimizer may evaluate a closure several times in a step, each time with averaged gradients.

        Usual cause:
            The closure is run once by the strategy and its result passed on, or gradients are only averaged
            after the optimizer has used them.
        """
        truth, wanted = _twice_plainly()
        for evaluations, weights in ranks.run(train_with_closure):
            assert evaluations == wanted, f"the closure was evaluated {evaluations} times, not {wanted}"
            oracle.assert_same_weights(weights, truth, 1e-6)

    @pytest.mark.parametrize("optimizer", ["Adafactor", "Muon", "DistanceEstimate"])
    @promise(needs=Capability.ANY_OPTIMIZER, after=("averages_gradients",))
    def test_any_optimizer_steps(self, ranks: Ranks, optimizer: str) -> None:
        """An optimizer that looks at whole matrices, or across tensors, steps as in plain PyTorch.

        Usual cause:
            It is handed flat pieces, and takes each for a parameter of its own, or sees on each rank other tensors
            than the rest. Then the capability must not be declared, and core refuses such optimizers.
        """
        # Muon computes in bfloat16, which a GPU rounds otherwise.
        there = ranks.run(train_plainly_by_more_than_elements, optimizer)[0] if self.device == "cuda" else None
        truth = there or plainly("plain", _MORE_THAN_ELEMENTS[optimizer], _STEPS)
        assert_like(ranks.run(train_by_more_than_elements, optimizer), truth)


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def _inputs(steps: int) -> list[torch.Tensor]:
    return [inputs for inputs, _ in models.batches("plain", steps, BATCH)]


def _adversaries() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(6, 4), nn.Linear(4, 1)


@functools.cache
def _adversaries_plainly() -> tuple[Weights, Weights]:
    torch.manual_seed(0)
    generator, critic = _adversaries()
    step_generator, step_critic = _sgd(generator), _sgd(critic)
    for inputs in _inputs(_STEPS):
        critic(generator(inputs).detach()).square().mean().backward()
        step_critic.step()
        step_critic.zero_grad()
        (-critic(generator(inputs)).square().mean()).backward()
        step_generator.step()
        step_generator.zero_grad()
        step_critic.zero_grad()
    return generator.state_dict(), critic.state_dict()


@functools.cache
def _waiting_plainly(backwards: int) -> Weights:
    torch.manual_seed(0)
    generator, critic = _adversaries()
    step_critic = _sgd(critic)
    for inputs in _inputs(backwards):
        critic(generator(inputs).detach()).square().mean().backward()
    step_critic.step()
    return critic.state_dict()


def train_while_one_waits(subject: Subject) -> tuple[bool, Weights]:
    """Step a critic that waits after its generator's backward; where that is refused, after its own, too."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            made = _adversaries()
        ready = [strategy.setup_module_and_optimizers(module, [_sgd(module)]) for module in made]
        (generator, _), (critic, (step_critic,)) = ready
        first, second = (models.share_of(strategy, (batch,))[0] for batch in _inputs(2))
        with strategy.no_backward_sync(critic):
            strategy.backward(critic(generator(first).detach()).square().mean(), critic)
        strategy.backward(generator(first).square().mean(), generator)
        try:
            strategy.optimizer_step(step_critic)
        except SetupError:
            strategy.backward(critic(generator(second).detach()).square().mean(), critic)
            strategy.optimizer_step(step_critic)
            return True, whole_weights(strategy, critic)
        return False, whole_weights(strategy, critic)


def train_adversaries(subject: Subject) -> tuple[Weights, Weights]:
    """Train a generator against a critic and return their weights."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            made = _adversaries()
        ready = [strategy.setup_module_and_optimizers(module, [_sgd(module)]) for module in made]
        (generator, (step_generator,)), (critic, (step_critic,)) = ready
        for batch in _inputs(_STEPS):
            (inputs,) = models.share_of(strategy, (batch,))
            strategy.backward(critic(generator(inputs).detach()).square().mean(), critic)
            strategy.optimizer_step(step_critic)
            step_critic.zero_grad()
            strategy.backward(-critic(generator(inputs)).square().mean(), generator)
            strategy.optimizer_step(step_generator)
            step_generator.zero_grad()
            step_critic.zero_grad()
        return whole_weights(strategy, generator), whole_weights(strategy, critic)


def _halves(module: Any) -> list[torch.optim.Optimizer]:
    return [_sgd(module.first), torch.optim.AdamW(module.second.parameters(), lr=0.1)]


@functools.cache
def _halves_plainly() -> Weights:
    torch.manual_seed(0)
    module = models.make("plain")
    slow, fast = _halves(module)
    for number, batch in enumerate(models.batches("plain", 2 * _STEPS, BATCH)):
        module(*batch).backward()
        for optimizer in (fast, slow) if number % 2 else (fast,):
            optimizer.step()
            optimizer.zero_grad()
    return module.state_dict()


def train_halves(subject: Subject) -> Weights:
    """Train a module whose second half steps twice as often as the first, and return its weights."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            built = models.make("plain")
        module, (slow, fast) = strategy.setup_module_and_optimizers(built, _halves(built))
        for number, batch in enumerate(models.batches("plain", 2 * _STEPS, BATCH)):
            strategy.backward(module(*models.share_of(strategy, batch)), module)
            for optimizer in (fast, slow) if number % 2 else (fast,):
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        return whole_weights(strategy, module)


class _Twice(torch.optim.Optimizer):
    """Descends twice in a step, each time by the gradients of a new evaluation."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], Any]) -> None:  # type: ignore[override]
        """Evaluate and descend, twice."""
        for _ in range(2):
            with torch.enable_grad():
                closure()
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.sub_(parameter.grad, alpha=group["lr"])


@functools.cache
def _twice_plainly() -> tuple[Weights, int]:
    torch.manual_seed(0)
    module = models.make("plain")
    optimizer = _Twice(module.parameters())
    count = 0
    for batch in models.batches("plain", _STEPS, BATCH):

        def closure(batch: tuple[Any, ...] = batch) -> None:
            nonlocal count
            count += 1
            optimizer.zero_grad()
            module(*batch).backward()

        optimizer.step(closure)
    return module.state_dict(), count


def train_with_closure(subject: Subject) -> tuple[int, Weights]:
    """Train with an optimizer that evaluates its closure twice; return how often it did, and the weights."""
    count = 0
    with subject.strategy() as strategy:
        module, optimizer = set_up(strategy, "plain", lambda module: _Twice(module.parameters()))
        for batch in models.batches("plain", _STEPS, BATCH):
            share = models.share_of(strategy, batch)

            def closure(share: tuple[Any, ...] = share) -> torch.Tensor:
                nonlocal count
                count += 1
                optimizer.zero_grad()
                loss: torch.Tensor = module(*share)
                strategy.backward(loss, module)
                return loss

            strategy.optimizer_step(optimizer, closure)
        return count, whole_weights(strategy, module)


def _adafactor(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(module.parameters(), lr=0.05)


def _muon(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in module.parameters() if parameter.ndim == 2], lr=0.02)


class DistanceEstimate(torch.optim.Optimizer):
    """Descends as far as an estimate over all tensors says that there is to go, which its group keeps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Estimate and descend."""
        if closure is not None:
            raise TypeError("no closure is needed here.")
        for group in self.param_groups:
            ready = [parameter for parameter in group["params"] if parameter.grad is not None]
            along = sum(float((parameter * parameter.grad).sum()) for parameter in ready)
            squares = sum(float(parameter.grad.square().sum()) for parameter in ready)
            group["distance"] = max(group.get("distance", 0.0), abs(along) / (squares + 1e-8))
            for parameter in ready:
                parameter.sub_(parameter.grad, alpha=group["lr"] * group["distance"])


def _distance_estimate(module: nn.Module) -> torch.optim.Optimizer:
    return DistanceEstimate(module.parameters(), lr=0.1)


_MORE_THAN_ELEMENTS = {"Adafactor": _adafactor, "Muon": _muon, "DistanceEstimate": _distance_estimate}


def train_by_more_than_elements(subject: Subject, optimizer: str) -> Run:
    """Train with an optimizer that looks at more than one element at a time."""
    return train(subject, "plain", _MORE_THAN_ELEMENTS[optimizer], _STEPS)


def train_plainly_by_more_than_elements(subject: Subject, optimizer: str) -> oracle.Trajectory:
    """Train so in plain PyTorch, where the strategy would compute."""
    with subject.strategy() as strategy:
        device = device_of(strategy)
    return plainly("plain", _MORE_THAN_ELEMENTS[optimizer], _STEPS, device)
