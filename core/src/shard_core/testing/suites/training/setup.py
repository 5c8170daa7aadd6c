"""Setting up modules, optimizers and schedulers changes their place and nothing else."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shard_core.capability import Capability
from shard_core.errors import SetupError, ShardError
from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

#: What a scheduler multiplies the learning rates by, step after step.
_FACTORS = (0.25, 0.5, 1.0, 0.0, 0.0)

#: What the optimizer's group of matrices says, and its group of all else.
_SETTINGS: tuple[dict[str, Any], ...] = (
    {"lr": 0.5, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6},
    {"lr": 0.25, "weight_decay": 0.4, "betas": (0.7, 0.99), "eps": 1e-7},
)


_Steps = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
"""The weights before and after."""


class Setup(Suite):
    """Optimizers and schedulers outlive setup."""

    @promise(after=("same_seed_same_weights",))
    def test_optimizer_made_before_or_after_setup(self, ranks: Ranks) -> None:
        """An optimizer steps the module's weights, whether it was made before setup or after.

        Where setup leaves parameters with other numbers of dims, several groups over them are refused with a
        SetupError: whoever distinguished matrices from the rest by ``ndim`` would have put all into one.

        Usual cause:
            The optimizer still holds the parameters that the module had before it was sharded, copied or cast:
            it steps tensors that nobody reads, and the weights never change.
        """
        together = self._assert_moved(ranks.run(two_steps, "together"))
        for way in self._later_ways():
            answers = ranks.run(two_steps, way)
            if all(isinstance(answer, str) for answer in answers):
                alone = self._assert_moved(ranks.run(two_steps, "together", True))
                _assert_like(way, ranks.run(two_steps, way, True), alone)
            else:
                _assert_like(way, answers, together)

    def _assert_moved(self, answers: list[_Steps | str]) -> list[_Steps | str]:
        for answer in answers:
            assert not isinstance(answer, str), f"setup of both together was refused: {answer}"
            before, after = answer
            still = [name for name, tensor in before.items() if torch.equal(tensor, after[name])]
            assert not still, f"two steps did not change {still}"
        return answers

    @promise(after=("optimizer_made_before_or_after_setup",))
    def test_param_groups_keep_their_settings(self, ranks: Ranks) -> None:
        """Each parameter is stepped with the learning rate and the weight decay of its own group.

        Usual cause:
            Groups are joined, rebuilt with the optimizer's defaults, or filled in another order when the
            optimizer is pointed at new parameters; or a learning rate is scaled by the world size.
        """
        for settings, before, after in ranks.run(decay_only):
            for number, (group, wanted) in enumerate(zip(settings, _SETTINGS, strict=True)):
                for name, value in wanted.items():
                    assert group[name] == value, f"{name} of group {number} is {group[name]}, it was {value}"
            expected = {name: tensor * _what_decay_leaves(tensor) for name, tensor in before.items()}
            oracle.assert_same_weights(after, expected, 1e-6, elementwise=True)

    @promise(after=("optimizer_made_before_or_after_setup",))
    def test_optimizers_stay_the_same_objects(self, ranks: Ranks) -> None:
        """Setup returns the optimizers it was given, and what is changed in their groups still steers the step.

        Usual cause:
            A new optimizer, or new groups, are made over the new parameters; whoever keeps the old ones, as
            learning-rate schedulers do, changes what nobody reads.
        """
        for same_optimizer, same_groups, moved in ranks.run(stop_a_group):
            assert same_optimizer, "setup returned another optimizer than it was given"
            assert same_groups, "the optimizer's groups are other dictionaries than before setup"
            matrices = {name for name in moved if name.endswith("weight")}
            wrong = sorted(name for name in moved if moved[name] == (name in matrices))
            assert not wrong, f"the rate of the matrices was set to 0 and that of the rest was not; wrong: {wrong}"

    @pytest.mark.parametrize("made", ["before", "after"])
    @promise(after=("param_groups_keep_their_settings", "optimizers_stay_the_same_objects"))
    def test_schedulers_count_steps_once(self, ranks: Ranks, made: str) -> None:
        """A scheduler's learning rates, step by step, are those of plain PyTorch, whatever the number of ranks.

        Usual cause:
            The strategy steps the scheduler as well, steps it once for each rank, or scales learning rates by
            the world size; or a scheduler made before setup changes an optimizer that no longer steps.
        """
        wanted = _scheduled_plainly()
        for rates, moved in ranks.run(schedule, made):
            assert rates == wanted, f"the rates of the two groups go {rates}, in plain PyTorch {wanted}"
            expected = [factor != 0 for factor in _FACTORS]
            assert moved == expected, f"the weights moved in steps {moved}, the rates say {expected}"

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    @promise(after=("param_groups_keep_their_settings", "optimizers_stay_the_same_objects"))
    def test_optimizer_state_moves_along(self, ranks: Ranks, optimizer: str) -> None:
        """An optimizer that has stepped before setup goes on from its moments, or is refused with ``SetupError``.

        Usual cause:
            State stays under the keys of the old parameters, so the optimizer silently begins anew.
        """
        truth = _remembered_plainly(optimizer)
        for way in ("together", *self._later_ways()[:1]):
            for answer in ranks.run(step_from_memory, optimizer, way):
                if not isinstance(answer, str):
                    oracle.assert_same_weights(answer, truth, 1e-6, elementwise=True)

    @pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
    @promise(after=("optimizer_state_moves_along",))
    def test_plain_optimizer_state_loads(self, ranks: Ranks, optimizer: str) -> None:
        """``optimizer.load_state_dict`` after setup takes what plain PyTorch has saved, or refuses it.

        Usual cause:
            Whole tensors stay beside shards, and a kernel that does not compare shapes steps with their first rows.
        """
        truth = _remembered_plainly(optimizer)
        for answer in ranks.run(step_from_loaded_memory, optimizer):
            if not isinstance(answer, str):
                oracle.assert_same_weights(answer, truth, 1e-6, elementwise=True)

    def _later_ways(self) -> tuple[str, ...]:
        offered = Capability.INFERENCE in self.info.capabilities
        return ("setup_optimizer for one made before", "setup_optimizer for one made after") if offered else ()


def _assert_like(way: str, answers: list[_Steps | str], together: list[_Steps | str]) -> None:
    for mine, truth in zip(answers, together, strict=True):
        assert not isinstance(mine, str), f"with {way} it was refused: {mine}"
        assert not isinstance(truth, str)
        try:
            oracle.assert_same_weights(mine[1], truth[1], 1e-6)
        except AssertionError as error:
            raise AssertionError(f"with {way} it is not what setup of both together gives: {error}") from error


def _set_up(
    strategy: Strategy, module: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], way: str
) -> tuple[nn.Module, torch.optim.Optimizer]:
    if way == "together":
        ready, (optimizer,) = strategy.setup_module_and_optimizers(module, [make(module)])
        return ready, optimizer
    early = make(module) if way.endswith("before") else None
    ready = strategy.setup_module(module)
    return ready, strategy.setup_optimizer(early or make(ready))


def _step(
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: tuple[Any, ...],
    *,
    factor: float = 1.0,
) -> None:
    strategy.backward(model(*models.share_of(strategy, batch)) * factor, model)
    strategy.optimizer_step(optimizer)
    optimizer.zero_grad()


def _two_rates(module: nn.Module) -> torch.optim.Optimizer:
    groups = models.param_groups(module)
    rates = (0.5, 0.25)
    return torch.optim.SGD([{"params": group["params"], "lr": rate} for group, rate in zip(groups, rates, strict=True)])


def two_steps(subject: Subject, way: str, one_group: bool = False) -> _Steps | str:
    """Set up one way, take two steps, return the weights before and after, or why groups were rightly refused."""
    make = _one_group if one_group else functools.partial(models.make_optimizer, "adamw")
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            module = models.make("plain")
        dims = sorted(parameter.ndim for parameter in module.parameters())
        try:
            model, optimizer = _set_up(strategy, module, make, way)
        except SetupError as refusal:
            if way != "together" and sorted(parameter.ndim for parameter in module.parameters()) != dims:
                return str(refusal)
            raise
        before = whole_weights(strategy, model)
        for batch in models.batches("plain", 2, BATCH):
            _step(strategy, model, optimizer, batch)
        return before, whole_weights(strategy, model)


def _one_group(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def _two_groups(module: nn.Module) -> torch.optim.Optimizer:
    parameters = list(module.parameters())
    members = [[p for p in parameters if p.ndim >= 2], [p for p in parameters if p.ndim < 2]]
    groups = [{"params": group, **settings} for group, settings in zip(members, _SETTINGS, strict=True)]
    return torch.optim.AdamW(groups)


def _what_decay_leaves(parameter: torch.Tensor) -> float:
    settings = _SETTINGS[parameter.ndim < 2]
    return 1.0 - float(settings["lr"] * settings["weight_decay"])


def decay_only(subject: Subject) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Step with gradients of zero, so that only decay acts; return the groups' settings, weights before and after."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, "uneven", _two_groups)
        before = whole_weights(strategy, model)
        (batch,) = models.batches("uneven", 1, BATCH)
        _step(strategy, model, optimizer, batch, factor=0.0)
        settings = [{name: group[name] for name in _SETTINGS[0]} for group in optimizer.param_groups]
        return settings, before, whole_weights(strategy, model)


def stop_a_group(subject: Subject) -> tuple[bool, bool, dict[str, bool]]:
    """Set the rate of the first group to 0 in the objects kept from before setup; return which weights move."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            module = models.make("plain")
        kept = _two_rates(module)
        groups = list(kept.param_groups)
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [kept])
        same = len(groups) == len(optimizer.param_groups) and all(map(_is, groups, optimizer.param_groups))
        groups[0]["lr"] = 0.0
        before = whole_weights(strategy, model)
        (batch,) = models.batches("plain", 1, BATCH)
        _step(strategy, model, optimizer, batch)
        after = whole_weights(strategy, model)
        return optimizer is kept, same, {name: not torch.equal(before[name], after[name]) for name in before}


def _is(one: object, other: object) -> bool:
    return one is other


def _scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _FACTORS[min(step, len(_FACTORS) - 1)])


@functools.cache
def _scheduled_plainly() -> list[list[float]]:
    optimizer = _two_rates(models.make("plain"))
    scheduler = _scheduler(optimizer)
    rates = []
    for _ in _FACTORS:
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rates


def schedule(subject: Subject, made: str) -> tuple[list[list[float]], list[bool]]:
    """Step an optimizer and its scheduler; return the rates each step had and whether the weights moved."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            module = models.make("plain")
        kept = _two_rates(module)
        early = _scheduler(kept) if made == "before" else None
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [kept])
        scheduler = early or _scheduler(optimizer)
        rates, moved = [], []
        for batch in models.batches("plain", len(_FACTORS), BATCH):
            before = whole_weights(strategy, model)
            rates.append([float(group["lr"]) for group in optimizer.param_groups])
            _step(strategy, model, optimizer, batch)
            scheduler.step()
            after = whole_weights(strategy, model)
            moved.append(any(not torch.equal(before[name], after[name]) for name in before))
        return rates, moved


def _stepped(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train in plain PyTorch, so that the optimizer has something to remember."""
    torch.manual_seed(0)
    module = models.make("uneven")
    optimizer = models.make_optimizer(name, module)
    for batch in models.batches("uneven", 2, BATCH):
        module(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


@functools.cache
def _remembered_plainly(name: str) -> dict[str, torch.Tensor]:
    module, optimizer = _stepped(name)
    (batch,) = models.batches("uneven", 1, BATCH)
    (module(*batch) * 0.0).backward()
    optimizer.step()
    return copy.deepcopy(module.state_dict())


def step_from_loaded_memory(subject: Subject, name: str) -> dict[str, torch.Tensor] | str:
    """Set up with a new optimizer, load into it what plain training remembers, step with gradients of zero."""
    with subject.strategy() as strategy:
        module, stepped = _stepped(name)
        remembered = copy.deepcopy(stepped.state_dict())
        model, optimizer = _set_up(strategy, module, functools.partial(models.make_optimizer, name), "together")
        try:
            optimizer.load_state_dict(remembered)
            (batch,) = models.batches("uneven", 1, BATCH)
            _step(strategy, model, optimizer, batch, factor=0.0)
        except ShardError as refusal:
            return str(refusal)
        return whole_weights(strategy, model)


def step_from_memory(subject: Subject, name: str, way: str) -> dict[str, torch.Tensor] | str:
    """Train plainly, set up, step with gradients of zero: only what the optimizer remembers moves the weights."""
    with subject.strategy() as strategy:
        module, optimizer = _stepped(name)
        try:
            model, optimizer = _set_up(strategy, module, lambda _: optimizer, way)
        except SetupError as refusal:
            return str(refusal)
        (batch,) = models.batches("uneven", 1, BATCH)
        _step(strategy, model, optimizer, batch, factor=0.0)
        return whole_weights(strategy, model)
