"""Every precision a strategy declares has the dtypes of its table and the numbers of plain PyTorch."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shard_core.errors import UnsupportedPrecision
from shard_core.precision.dtypes import convert_input, dtype_named
from shard_core.precision.policies import POLICIES
from shard_core.selection import get_strategy
from shard_core.testing import models, oracle, plain_descent
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from shard_core.precision.interface import PrecisionPolicy
    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_BATCH = 96
"""Large enough that on up to eight ranks no gradient overflows float16 under the scaler's first factor."""
_STEPS = 4

_BOUNDS = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 2e-2}
"""How far losses and weights may be from plain PyTorch's, which sums in another order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A few steps under a precision.

    Attributes:
        table: The table the strategy says it keeps.
        seen: What the last matrix product and the loss were computed in.
        losses: The mean loss of each step.
        weights: Where they ended.
    """

    table: PrecisionPolicy
    seen: tuple[str, str]
    losses: list[float]
    weights: dict[str, torch.Tensor]


class Precisions(Suite):
    """Every precision a strategy declares has the dtypes of its table and the numbers of plain PyTorch.

    An option may take one away; then it is refused when the strategy is built, and only with that option.
    """

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Parametrize promises by each precision the strategy declares."""
        super().pytest_generate_tests(metafunc)
        if "precision" in metafunc.fixturenames:
            metafunc.parametrize("precision", self.info.precisions)

    @promise(after=("averages_gradients",))
    def test_step_says_whether_it_stepped(self, ranks: Ranks) -> None:
        """``optimizer_step`` returns True on every rank when it stepped.

        Usual cause:
            It returns what the engine's step returned: nothing, or the loss.
        """
        for rank, answer in enumerate(ranks.run(one_step)):
            assert answer is True, f"rank {rank} stepped and optimizer_step returned {answer!r}"

    @promise(after=("averages_gradients",))
    def test_precision_has_its_dtypes(self, ranks: Ranks, precision: str) -> None:
        """Parameters, gradients, optimizer state and buffers have the dtypes that the precision's table says.

        Usual cause:
            Another precision is used than the one that was asked for, the module is cast once more without the
            precision's back, or integer buffers are cast along.
        """
        if self._options_refuse(precision):
            return
        for rank, (used, found) in enumerate(ranks.run(dtypes, precision)):
            policy = _table(precision, used)
            expected = _expected_dtypes(policy, found)
            wrong = {what: dtype for what, dtype in found.items() if dtype != expected[what]}
            assert not wrong, f"on rank {rank} dtypes are not those of {policy}: {wrong}"

    @promise(every_size=False)
    def test_undeclared_precision_is_refused(self) -> None:
        """A precision that the strategy does not declare, or that nobody knows, is refused when it is asked for.

        Usual cause:
            The strategy's own ``precisions`` and what it is built with do not agree.
        """
        undeclared = [name for name in POLICIES if name not in self.info.precisions]
        for name in (*undeclared, "12-mixed"):
            with pytest.raises(UnsupportedPrecision):
                self.subject.strategy(precision=name)

    @promise(after=("averages_gradients", "precision_has_its_dtypes"), every_size=False)
    def test_mixed_precision_is_autocast(self, ranks: Ranks) -> None:
        """Matrix products run in 16 bits and the loss in float32, with the numbers of plain autocast.

        Usual cause:
            The forward runs outside the precision's context, or everything is cast though the table says autocast.
        """
        self._judge_each(ranks, autocast=True)

    @promise(after=("averages_gradients", "precision_has_its_dtypes"), every_size=False)
    def test_true_precision_computes_in_it(self, ranks: Ranks) -> None:
        """Matrix products and the loss run in the precision's one dtype, with the numbers of plain PyTorch in it.

        Usual cause:
            Inputs are not cast along, or something on the way - a reduction, a state - stays in float32.
        """
        self._judge_each(ranks, autocast=False)

    def _options_refuse(self, precision: str) -> bool:
        """Return whether the options given here take a declared precision away, which is honoured otherwise."""
        try:
            self.subject.strategy(precision=precision)
        except UnsupportedPrecision:
            get_strategy(self.strategy, accelerator=self.device, precision=precision)
            return True
        return False

    def _judge_each(self, ranks: Ranks, *, autocast: bool) -> None:
        for precision in self.info.precisions:
            if POLICIES[precision].autocast == autocast and not self._options_refuse(precision):
                truth = _in_plain_pytorch(precision)
                for rank, answer in enumerate(ranks.run(trained, precision)):
                    _assert_computed_in_it(f"{precision} on rank {rank}", precision, answer, truth)


class Watched(nn.Module):
    """A small regression that notes what its forward was computed in."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 3)
        self.seen = ("", "")

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the mean squared error."""
        predicted = self.second(torch.tanh(self.first(inputs)))
        loss = functional.mse_loss(predicted, targets)
        self.seen = (_name(predicted), _name(loss))
        return loss


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _assert_computed_in_it(where: str, precision: str, answer: Trained, truth: oracle.Trajectory) -> None:
    table = _table(precision, answer.table)
    expected = (table.compute, "float32" if table.autocast else table.compute)
    assert answer.seen == expected, f"in {where} matrix product and loss ran in {answer.seen}, must be {expected}"
    bound = _BOUNDS[table.compute]
    oracle.assert_same_numbers(f"{where}: loss", answer.losses, truth.losses, bound)
    weights = answer.weights
    if table.optimizer != table.parameter:
        # The optimizer steps a copy of its own, and that is what is handed out and saved.
        kept = {_name(weight) for weight in weights.values() if weight.is_floating_point()}
        assert kept == {table.optimizer}, f"in {where} weights are handed out as {kept}, must be {table.optimizer}"
        weights = {name: weight.to(truth.weights[name].dtype) for name, weight in weights.items()}
    oracle.assert_same_weights(weights, truth.weights, bound)


def _table(precision: str, used: PrecisionPolicy) -> PrecisionPolicy:
    """Choose the strategy's own table where it has one for this name: it may say that it casts."""
    return used if used.name == precision else POLICIES[precision]


def _expected_dtypes(policy: PrecisionPolicy, found: dict[str, str]) -> dict[str, str]:
    declared = {
        "parameter": policy.parameter,
        "gradient": policy.accumulate,
        "state": policy.optimizer,
        "buffer": policy.buffer,
    }
    return {what: "int64" if what == "buffer calls" else declared[what.split()[0]] for what in found}


@functools.cache
def _in_plain_pytorch(precision: str) -> oracle.Trajectory:
    policy = POLICIES[precision]
    parameter, compute = dtype_named(policy.parameter), dtype_named(policy.compute)
    batches = models.batches("plain", _STEPS, _BATCH)
    return oracle.train(
        lambda: Watched().to(parameter),
        _make_slow_optimizer,
        batches if policy.autocast else convert_input(batches, compute),
        autocast_dtype=compute if policy.autocast else None,
    )


def _make_slow_optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def one_step(subject: Subject) -> Any:
    """Take one step and return what ``optimizer_step`` returned."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, Watched, plain_descent.make_optimizer)
        (batch,) = models.batches("plain", 1, _BATCH)
        strategy.backward(model(*models.share_of(strategy, batch)), model)
        return strategy.optimizer_step(optimizer)


def dtypes(subject: Subject, precision: str) -> tuple[PrecisionPolicy, dict[str, str]]:
    """Take one step; return the table that holds, and the dtypes of what there is."""
    with subject.strategy(precision=precision) as strategy:
        model, optimizer = set_up(strategy, "buffers", _make_slow_optimizer)
        (batch,) = models.batches("buffers", 1, _BATCH)
        strategy.backward(model(*models.share_of(strategy, batch)), model)
        own = strategy.unwrap(model)
        found = {f"parameter {name}": _name(tensor) for name, tensor in own.named_parameters()}
        found |= {f"gradient {name}": _name(p.grad) for name, p in own.named_parameters() if p.grad is not None}
        found |= {f"buffer {name}": _name(tensor) for name, tensor in own.named_buffers()}
        strategy.optimizer_step(optimizer)
        state = strategy.optimizer_state_dict(optimizer).get("state", {})
        found |= {f"state {name}": _name(slots["momentum_buffer"]) for name, slots in state.items()}
        return strategy.precision.policy, found


def trained(subject: Subject, precision: str) -> Trained:
    """Train a few steps and return the dtypes they were computed in."""
    with subject.strategy(precision=precision) as strategy:
        model, optimizer = set_up(strategy, Watched, _make_slow_optimizer)
        losses = [_step(strategy, model, optimizer, batch) for batch in models.batches("plain", _STEPS, _BATCH)]
        seen: Any = strategy.unwrap(model).seen
        return Trained(
            table=strategy.precision.policy, seen=seen, losses=losses, weights=whole_weights(strategy, model)
        )


def _step(strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Any, ...]) -> float:
    loss = model(*models.share_of(strategy, batch))
    strategy.backward(loss, model)
    strategy.optimizer_step(optimizer)
    optimizer.zero_grad()
    return float(strategy.all_reduce(loss.detach()))
