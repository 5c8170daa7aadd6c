"""Users see whole gradients by name, as a step would take them, and change nothing by looking."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shard_core.capability import Capability
from shard_core.errors import ShardError
from shard_core.testing import models, oracle, plain_descent
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from torch import nn

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_BATCH, _MICRO = 12, 2
_BOUND = 1e-5
_CLIP = 0.05
"""Far below any norm here."""

_WHOLE = "gradients_are_shown_whole"
_HOOKED, _HOOKED_STEPS = "first.weight", 3

Gradients = dict[str, torch.Tensor]


class Shown(Suite):
    """Users see whole gradients by name, as a step would take them, and change nothing by looking."""

    @pytest.mark.parametrize("model", ["gpt", "frozen", "uneven", "scalar"])
    @promise(after=("micro_batches_add_up", "clips_by_norm", "ties_stay_tied", "frozen_parameters_stay_frozen"))
    def test_gradients_are_shown_whole(self, ranks: Ranks, model: str) -> None:
        """After each micro-batch, and after clipping, rank 0 is shown the whole gradients of plain PyTorch by name.

        A tied gradient stands under each of its names, a frozen parameter has none. Other ranks are shown nothing, and
        the step is what it would have been unseen.

        Usual cause:
            The engine keeps gradients in parts, in tensors of its own, or shows those of one rank; or they are made
            final by the first look, and the next micro-batch is mixed with them.
        """
        truths, weights = _looks_in_plain_pytorch(model)
        for rank, (looks, stepped) in enumerate(ranks.run(look, model)):
            for shown, truth in zip(looks, truths, strict=True):
                oracle.assert_same_weights(shown, {} if rank else truth, _BOUND, elementwise=True)
            oracle.assert_same_weights(stepped, weights, _BOUND, elementwise=True)

    @promise(needs=Capability.SEVERAL_MODULES, after=(_WHOLE,), every_size=False)
    def test_each_module_shows_its_gradients(self, ranks: Ranks) -> None:
        """Of several modules that a loss runs through, each shows its own gradients.

        Usual cause:
            Gradients are found by place, or those of the module that was set up last are shown.
        """
        truth = _gradients_of_two()
        shown = ranks.run(look_at_two)[0]
        for mine, expected in zip(shown, truth, strict=True):
            oracle.assert_same_weights(mine, expected, _BOUND, elementwise=True)

    @promise(needs=Capability.DENOMINATOR, after=(_WHOLE, "denominator_gives_the_global_mean"), every_size=False)
    def test_shown_gradients_are_divided(self, ranks: Ranks) -> None:
        """Gradients of sums are shown divided by the denominators of all ranks, though no step is near.

        Usual cause:
            The denominator is applied in place by clipping and stepping alone.
        """
        truth = _looks_in_plain_pytorch("uneven")[0][_MICRO - 1]
        oracle.assert_same_weights(ranks.run(look_at_sums)[0], truth, _BOUND, elementwise=True)

    @pytest.mark.parametrize("when", ["before", "after"])
    @promise(after=("averages_gradients",))
    def test_hooks_change_each_ranks_gradient(self, ranks: Ranks, when: str) -> None:
        """A hook on a parameter's gradient sees the whole one of this rank's samples; what it returns is averaged.

        Registered before setup, or after it on what the module lists. A strategy may refuse such hooks instead, on
        every rank and before the step, with a ``ShardError`` that names the parameter.

        Usual cause:
            Setup gives the module other parameters than those with the hooks; or hooks are called with shards, or with
            what was averaged already.
        """
        answers = ranks.run(train_hooked, when)
        if all(isinstance(answer, str) for answer in answers):
            assert all(_HOOKED in answer for answer in answers), f"the refusal does not name {_HOOKED!r}: {answers}"
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        for (rank, data_ranks), seen, weights in answers:
            theirs, truth = _hooked_plainly(data_ranks)
            assert len(seen) == len(theirs[rank]), f"the hook was called {len(seen)} times in {_HOOKED_STEPS} backwards"
            for mine, expected in zip(seen, theirs[rank], strict=True):
                oracle.assert_same_weights({_HOOKED: mine}, {_HOOKED: expected}, _BOUND)
            oracle.assert_same_weights(weights, truth, _BOUND)


class _Normalizing:
    """A hook that keeps what it sees and returns it with norm 1, which is not the same before averaging and after."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        self.seen.append(gradient.detach())
        changed: torch.Tensor = gradient / gradient.norm()
        return changed


def _batches(name: str) -> list[tuple[Any, ...]]:
    return list(models.batches(name, _MICRO, _BATCH))


def _by_every_name(module: nn.Module) -> Gradients:
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter.grad.clone() for name, parameter in named if parameter.grad is not None}


@functools.cache
def _looks_in_plain_pytorch(name: str) -> tuple[list[Gradients], Gradients]:
    """Return the gradients after each micro-batch and after clipping, and the weights after the step."""
    torch.manual_seed(0)
    model = models.make(name)
    optimizer = plain_descent.make_optimizer(model)
    looks = []
    for batch in _batches(name):
        (model(*batch) / _MICRO).backward()
        looks.append(_by_every_name(model))
    torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    looks.append(_by_every_name(model))
    optimizer.step()
    return looks, {name: weight.clone() for name, weight in model.state_dict().items()}


@functools.cache
def _hooked_plainly(data_ranks: int) -> tuple[list[list[torch.Tensor]], Gradients]:
    """Return what the hook sees on each data rank, and the weights at the end."""
    torch.manual_seed(0)
    model = models.make("plain")
    optimizer = plain_descent.make_optimizer(model)
    hook = _Normalizing()
    dict(model.named_parameters())[_HOOKED].register_hook(hook)
    for batch in models.batches("plain", _HOOKED_STEPS, _BATCH):
        for rank in range(data_ranks):
            model(*models.share(batch, rank, data_ranks)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= data_ranks
        optimizer.step()
        optimizer.zero_grad()
    seen = [[each.clone() for each in hook.seen[rank::data_ranks]] for rank in range(data_ranks)]
    return seen, {name: weight.clone() for name, weight in model.state_dict().items()}


@functools.cache
def _gradients_of_two() -> tuple[Gradients, Gradients]:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(6, 6), models.make("plain")
    inputs, targets = _batches("plain")[0]
    second(first(inputs), targets).backward()
    return _by_every_name(first), _by_every_name(second)


def look(subject: Subject, name: str) -> tuple[list[Gradients], Gradients]:
    """Look at the gradients after each micro-batch and after clipping; return the weights after the step too."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, name, plain_descent.make_optimizer)
        looks = []
        for batch in _batches(name):
            strategy.backward(model(*models.share_of(strategy, batch)) / _MICRO, model)
            looks.append(strategy.module_gradients(model))
        strategy.clip_gradients_norm(model, optimizer, _CLIP)
        looks.append(strategy.module_gradients(model))
        strategy.optimizer_step(optimizer)
        return looks, whole_weights(strategy, model)


def train_hooked(subject: Subject, when: str) -> tuple[tuple[int, int], list[torch.Tensor], Gradients] | str:
    """Train with a hook on a parameter, or return the strategy's error.

    Returns:
        This data rank and their number, what the hook has seen, and the weights.
    """
    hook = _Normalizing()
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            made = models.make("plain")
        if when == "before":
            dict(made.named_parameters())[_HOOKED].register_hook(hook)
        data = strategy.distributed_sampler_kwargs
        try:
            model, optimizer = _set_up(strategy, made)
            if when == "after":
                dict(strategy.unwrap(model).named_parameters())[_HOOKED].register_hook(hook)
            for batch in models.batches("plain", _HOOKED_STEPS, _BATCH):
                strategy.backward(model(*models.share_of(strategy, batch)), model)
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        except ShardError as refusal:
            return str(refusal)
        seen = [each.cpu() for each in hook.seen]
        return (data["rank"], data["num_replicas"]), seen, whole_weights(strategy, model)


def look_at_two(subject: Subject) -> tuple[Gradients, Gradients]:
    """Look at the gradients of two modules that one loss ran through."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            made = torch.nn.Linear(6, 6), models.make("plain")
        (first, _), (second, _) = (_set_up(strategy, each) for each in made)
        inputs, targets = models.share_of(strategy, _batches("plain")[0])
        strategy.backward(second(first(inputs), targets), second)
        return strategy.module_gradients(first), strategy.module_gradients(second)


def look_at_sums(subject: Subject) -> Gradients:
    """Look at the gradients of sums, before anything has made them final."""
    with subject.strategy() as strategy:
        model, _ = set_up(strategy, "uneven", plain_descent.make_optimizer)
        for batch in _batches("uneven"):
            inputs, targets = models.share_of(strategy, batch)
            strategy.backward(model(inputs, targets, reduction="sum"), model, denominator=targets.numel())
        return strategy.module_gradients(model)


def _set_up(strategy: Strategy, module: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    ready, (optimizer,) = strategy.setup_module_and_optimizers(module, [plain_descent.make_optimizer(module)])
    return ready, optimizer
