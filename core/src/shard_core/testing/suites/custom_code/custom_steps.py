"""Loops and forwards that do more than a loss, a backward and a step take train as in plain PyTorch, or are refused."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from shard_core.errors import ShardError
from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import BATCH, device_of
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS = 4
_BOUND = 1e-5

Weights = dict[str, torch.Tensor]


class CustomSteps(Suite):
    """What plain PyTorch lets loops and forwards do with parameters counts, or is refused.

    A strategy may refuse it on every rank, before the step is over, with a ``ShardError`` that says what to do. What
    torch itself refuses where it is tried, as ``torch.autograd.grad`` by parameters of which others compute, does no
    harm either.
    """

    @promise(after=("averages_gradients",), every_size=False)
    def test_penalties_on_gradients_train(self, ranks: Ranks) -> None:
        """A loss may hold the gradient by an input, from ``torch.autograd.grad(..., create_graph=True)``.

        Usual cause:
            Messages between ranks, or what frees parameters after a backward, have no derivative of their own: the
            penalty is a constant, and weights are trained as if it were not there.
        """
        self._assert_trained(ranks, "penalty")

    @promise(after=("averages_gradients",), every_size=False)
    def test_assigned_gradients_are_averaged_or_refused(self, ranks: Ranks) -> None:
        """Ranks do not step with gradients of their own that ``torch.autograd.grad`` made and the user has assigned.

        Usual cause:
            Gradients are averaged by hooks that this way goes past; ranks drift apart without a word.
        """
        self._assert_trained(ranks, "assigned gradients")

    @promise(after=("averages_gradients",), every_size=False)
    def test_interrupted_backwards_leave_nothing(self, ranks: Ranks) -> None:
        """An exception may end a backward midway, as a lack of memory does; the next one begins the step anew.

        Usual cause:
            What was about to be sent is sent with the next gradients, or waited for in vain.
        """
        self._assert_trained(ranks, "interrupted")

    @pytest.mark.parametrize("how", ["failed", "stopped"])
    @promise(after=("averages_gradients",), every_size=False)
    def test_failed_forwards_leave_nothing(self, ranks: Ranks, how: str) -> None:
        """An exception may end a forward midway, between a backward and its step, too; what comes after trains on.

        So may a ``KeyboardInterrupt``, after which a notebook's next cell goes on.

        Usual cause:
            What was gathered for that forward is still there for the next one, which computes with the weights of
            before the step.
        """
        self._assert_trained(ranks, how)

    @promise(after=("averages_gradients",), every_size=False)
    def test_parameters_of_no_module_train_alike(self, ranks: Ranks) -> None:
        """A parameter that an optimizer is given and no module holds is trained alike on all ranks.

        Usual cause:
            Setup sees to the module's parameters alone, and the optimizer steps what is in its groups: the gradient of
            the other is that of one rank.
        """
        self._assert_trained(ranks, "free parameter")

    @promise(after=("averages_gradients", "changes_by_hand_count"), every_size=False)
    def test_hooks_on_steps_count(self, ranks: Ranks) -> None:
        """Hooks on an optimizer's step may drop gradients before it, and see and change the weights after it.

        Usual cause:
            What the optimizer steps is brought to the module, or taken from it, outside of the hooks: these see each
            rank's part, or the weights of before, and what they change is lost, or even the step.
        """
        self._assert_trained(ranks, "step hooks")

    @pytest.mark.parametrize("how", ["in place", "renormalised"])
    @promise(after=("averages_gradients",), every_size=False)
    def test_weights_written_in_forward_count(self, ranks: Ranks, how: str) -> None:
        """A forward may change weights in place under ``torch.no_grad()``.

        Usual cause:
            What computes is a gathered copy, which is thrown away after the forward, and the write with it; or each
            rank writes what its own samples ask for.
        """
        self._assert_trained(ranks, how)

    @pytest.mark.parametrize("how", ["assigned", "data"])
    @promise(after=("averages_gradients", "weights_written_in_forward_count"), every_size=False)
    def test_data_written_in_forward_count(self, ranks: Ranks, how: str) -> None:
        """A forward may change weights by their ``data``, as momentum encoders do.

        Usual cause:
            Torch counts no such write, and what computes is a gathered copy.
        """
        self._assert_trained(ranks, how)

    @promise(after=("averages_gradients", "changes_by_hand_count"), every_size=False)
    def test_weights_can_be_drawn_anew(self, ranks: Ranks) -> None:
        """Functions of ``torch.nn.init`` give parameters the values of plain PyTorch where ranks have the same seed.

        On a GPU those are what its generator draws, if parameters are there.

        Usual cause:
            Each rank draws its own part, all from the same generator, so that parts repeat one another; or functions
            that need whole tensors write to the parts.
        """
        there = ranks.run(train_unusually_in_plain_pytorch, "drawn anew")[0] if self.device == "cuda" else None
        self._assert_trained(ranks, "drawn anew", there)

    @promise(after=("averages_gradients", "layers_after_setup_train_or_are_refused"), every_size=False)
    def test_exchanged_parameters_count(self, ranks: Ranks) -> None:
        """A new parameter that is put in another's place between steps computes.

        Usual cause:
            The next forward puts the engine's own back, without a word.
        """
        self._assert_trained(ranks, "exchanged")

    @pytest.mark.parametrize("what", ["tied", "called with others"])
    @promise(after=("averages_gradients", "exchanged_parameters_count"), every_size=False)
    def test_borrowed_parameters_count(self, ranks: Ranks, what: str) -> None:
        """So does one of the module's own in another's place, and what a ``torch.func.functional_call`` puts there.

        Usual cause:
            Forwards read what the engine holds for the place.
        """
        self._assert_trained(ranks, what)

    def _assert_trained(self, ranks: Ranks, what: str, truth: Weights | None = None) -> None:
        truth = truth or _unusually_in_plain_pytorch(what)
        answers = ranks.run(train_unusually, what)
        if all(isinstance(answer, str) for answer in answers):
            return
        assert not any(isinstance(answer, str) for answer in answers), f"only some ranks refused: {answers}"
        for answer in answers:
            assert not isinstance(answer, str)
            oracle.assert_same_weights(answer, truth, _BOUND)


class _Model(nn.Module):
    """Two layers, and one that is written to."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.table = nn.Embedding(4, 8, max_norm=0.5 if what == "renormalised" else None)
        self.what, self.interrupts, self.fails = what, False, False
        self.exception: type[BaseException] = KeyboardInterrupt if what == "stopped" else _Interruption

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._write()
        rows = (inputs[:, 0].detach().abs() * 4).long().clamp(max=3)  # not the same on every rank
        hidden = torch.tanh(self.first(inputs)) + self.table(rows)
        if self.interrupts:
            hidden.register_hook(_interrupt)
        if self.fails:
            raise self.exception("after the first layer")
        return torch.as_tensor(self.last(torch.tanh(self.middle(hidden))))

    @torch.no_grad()
    def _write(self) -> None:
        slow, fast = self.middle.weight, self.first.bias
        if self.what == "in place":
            slow.mul_(0.9).add_(fast, alpha=0.1)
        elif self.what == "assigned":
            slow.data = slow.data * 0.9 + fast.data * 0.1
        elif self.what == "data":
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class _Interruption(Exception):
    """Ends a forward or a backward."""


def _interrupt(gradient: torch.Tensor) -> None:
    raise _Interruption(f"at a gradient of shape {tuple(gradient.shape)}")


class _Loop:
    """What a loop needs of a strategy, or of plain PyTorch."""

    def __init__(
        self, own: Any, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device | str = "cpu"
    ) -> None:
        self.own, self.model, self.optimizer = own, model, optimizer
        self.free = nn.Parameter(torch.ones(6, device=device))

    def call(self, inputs: torch.Tensor) -> torch.Tensor:
        """Call the module."""
        outputs: torch.Tensor = self.model(inputs)
        return outputs

    def fail(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Compute losses in vain, with gradients and without."""
        self.own.fails = True
        for gradients in (True, False):
            with contextlib.suppress(self.own.exception), torch.set_grad_enabled(gradients):
                self.loss(self.own.what, inputs, targets)
        self.own.fails = False

    def prepare(self, what: str, number: int) -> None:
        """Do what is done between steps."""
        if what == "step hooks" and number == 0:
            self.optimizer.register_step_pre_hook(self._drop)
            self.optimizer.register_step_post_hook(self._shrink)
        elif what == "free parameter" and number == 1:
            self.optimizer.add_param_group({"params": [self.free]})
        elif what == "drawn anew" and number == 2:
            torch.manual_seed(7)
            self.own.first.reset_parameters()
            nn.init.orthogonal_(self.own.middle.weight)
            nn.init.trunc_normal_(self.own.last.weight, std=0.3)
            nn.init.eye_(self.own.table.weight)
        elif what == "exchanged" and number == 2:
            self.own.middle.weight = nn.Parameter(torch.full((8, 8), 0.1, device=self.free.device))
        elif what == "tied" and number == 2:
            self.own.first.bias = self.own.middle.bias

    def _drop(self, *_: object) -> None:
        dict(self.own.named_parameters())["last.bias"].grad = None

    @torch.no_grad()
    def _shrink(self, *_: object) -> None:
        """Shrink weights by what they give for inputs that all ranks share."""
        size = self.call(torch.ones(2, 6, device=self.free.device)).float().square().mean()
        for parameter in self.own.parameters():
            parameter.mul_(1 / (1 + 0.1 * float(size)))

    def loss(self, what: str, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Compute the loss of a step."""
        if what == "free parameter":
            return functional.mse_loss(self.call(inputs * self.free), targets)
        if what == "called with others":
            halves = {name: parameter * 0.5 for name, parameter in self.own.named_parameters()}
            return functional.mse_loss(torch.func.functional_call(self.own, halves, (inputs,)), targets)
        inputs = inputs.clone().requires_grad_(what == "penalty")
        outputs = self.call(inputs)
        loss = functional.mse_loss(outputs, targets)
        if what != "penalty":
            return loss
        (gradient,) = torch.autograd.grad(outputs.square().sum(), inputs, create_graph=True)
        return loss + gradient.square().sum(1).mean()


def _descending(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)


@functools.cache
def _unusually_in_plain_pytorch(what: str, device: torch.device | str = "cpu") -> Weights:
    torch.manual_seed(0)
    model = _Model(what).to(device)
    loop = _Loop(model, model, _descending(model), device)
    for number, batch in enumerate(models.batches("plain", _STEPS, BATCH)):
        loop.prepare(what, number)
        loop.loss(what, *(tensor.to(device) for tensor in batch)).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def train_unusually_in_plain_pytorch(subject: Subject, what: str) -> Weights:
    """Train so in plain PyTorch, where the strategy has its parameters."""
    with subject.strategy() as strategy:
        model, _ = set_up(strategy, functools.partial(_Model, what), _descending)
        device = next(strategy.unwrap(model).parameters()).device
    return _unusually_in_plain_pytorch(what, device)


def train_unusually(subject: Subject, what: str) -> Weights | str:
    """Train in an unusual way; return the weights, or the strategy's error."""
    with subject.strategy() as strategy:
        try:
            model, optimizer = set_up(strategy, functools.partial(_Model, what), _descending)
            loop = _Loop(strategy.unwrap(model), model, optimizer, device_of(strategy))
            for number, batch in enumerate(models.batches("plain", _STEPS, BATCH)):
                loop.prepare(what, number)
                if what == "interrupted":
                    loop.own.interrupts = True
                    with contextlib.suppress(_Interruption):
                        strategy.backward(loop.loss(what, *models.share_of(strategy, batch)), model)
                    loop.own.interrupts = False
                loss = loop.loss(what, *models.share_of(strategy, batch))
                if what != "assigned gradients":
                    strategy.backward(loss, model)
                elif refusal := _assign_gradients(loss, loop.own):
                    return refusal
                if what in ("failed", "stopped"):
                    loop.fail(*models.share_of(strategy, batch))
                strategy.optimizer_step(optimizer)
                optimizer.zero_grad()
        except ShardError as refusal:
            return str(refusal)
        return whole_weights(strategy, model)


def _assign_gradients(loss: torch.Tensor, own: nn.Module) -> str:
    """Assign gradients that no backward of the strategy made; return torch's error where it makes none."""
    parameters: list[Any] = list(own.parameters())
    try:
        gradients = torch.autograd.grad(loss, parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
    except RuntimeError as error:
        return str(error)
    return ""
