"""Optimizers are known by what they do to a matrix and to its pieces."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from shard_core import Capability, get_strategy
from shard_core.errors import MissingCapability
from shard_core.optim.classification import KNOWN, why_not_elementwise
from shard_core.optim.trial import Trial
from shard_core.strategies.ddp import DDPStrategy
from shard_core.strategies.plugin import DDP

CPU = torch.device("cpu")


@pytest.mark.parametrize("fused_or_not", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_common_optimizers_work_element_by_element(kind: Any, fused_or_not: dict[str, bool]) -> None:
    assert why_not_elementwise(kind(nn.Linear(2, 2).parameters(), **fused_or_not), CPU) is None
    assert why_not_elementwise(unknown(kind)(nn.Linear(2, 2).parameters(), **fused_or_not), CPU) is None


def unknown(kind: Any) -> Any:
    """Derive a class from a known one: it does the same, and is tried in all steps."""
    return type("Derived", (kind,), {})


@pytest.mark.parametrize(
    "kind", [optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop]
)
def test_so_do_the_less_common(kind: Any) -> None:
    assert why_not_elementwise(kind(nn.Linear(2, 2).parameters()), CPU) is None
    assert why_not_elementwise(unknown(kind)(nn.Linear(2, 2).parameters()), CPU) is None


@pytest.mark.parametrize("kind", KNOWN)
def test_what_is_known_to_does_in_all_steps_of_the_trial(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    step = Trial.step
    monkeypatch.setattr(Trial, "step", lambda trial, gradients: steps.append(step(trial, gradients)))
    parameters = list(nn.Linear(2, 2).parameters())
    assert why_not_elementwise(kind(parameters, lr=0.0123), CPU) is None
    few = len(steps)
    assert why_not_elementwise(unknown(kind)(parameters, lr=0.0123), CPU) is None
    assert len(steps) - few == 6 * few > 0


class NormScaled(optim.SGD):
    """Divides each gradient by its norm, as LARS and LAMB do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


class ClippedBy(optim.SGD):
    """Clips by the norm of all its gradients, if it is set to, and keeps the limit outside of its groups."""

    def __init__(self, params: Any, lr: float = 0.1, limit: Any = None) -> None:
        super().__init__(params, lr=lr)
        self.limit = limit

    def step(self, closure: Any = None) -> Any:
        if self.limit is not None:
            limit = self.limit() if callable(self.limit) else self.limit
            nn.utils.clip_grad_norm_([each for group in self.param_groups for each in group["params"]], limit)
        return super().step(closure)


class RowStatistics(optim.SGD):
    """Needs a matrix as large as the number of rows squared, as Shampoo does."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert len(parameter) < 1000, "its time grows with the cube of that"
                rows = parameter.grad.reshape(len(parameter), -1)
                parameter.grad.copy_((rows @ rows.T @ rows).view_as(parameter))
        return super().step(closure)


class Tossing(optim.SGD):
    """Draws from every generator there is."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.add_(torch.rand_like(parameter.grad) + random.random() + np.random.rand())
        return super().step(closure)


class Masked(optim.SGD):
    """Asks for what no settings hold."""

    def __init__(self, parameters: Any, mask: torch.Tensor) -> None:
        super().__init__(parameters, lr=0.1)
        self.mask = mask


class Grouped(optim.SGD):
    """Works on whole matrices only in groups that say so."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if group.get("whole"):
                    parameter.grad.sub_(parameter.grad.mean())
        return super().step(closure)


class Distance(optim.SGD):
    """Estimates over all tensors how far there is to go, as Prodigy and D-Adaptation do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                along = float((parameter.detach() * parameter.grad).sum())
                group["distance"] = max(group.get("distance", 1e-6), 1e-12 * along)
        return super().step(closure)


class Projecting(optim.SGD):
    """Leaves each row its norm where gradients stand almost at right angles to it, as AdamP and SGDP do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in [each for each in group["params"] if each.ndim > 1]:
                rows, gradient = parameter.flatten(1), parameter.grad.flatten(1)
                if torch.cosine_similarity(rows, gradient).abs().max() < 0.1 / rows.shape[1] ** 0.5:
                    unit = rows / rows.norm(dim=1, keepdim=True)
                    gradient -= unit * (unit * gradient).sum(1, keepdim=True)
        return super().step(closure)


class FirstComes(optim.SGD):
    """Decays only what it meets first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["params"][0].mul_(0.9)
        return super().step(closure)


class Gathering(optim.SGD):
    """Keeps for each tensor what it would switch by after thousands of steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0.0) + float(parameter.grad.square().mean())
        return super().step(closure)


class Centring(optim.SGD):
    """Takes the mean away from the kernels of convolutions alone."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in [each for each in group["params"] if each.ndim > 2]:
                parameter.grad.sub_(parameter.grad.mean(dim=(1, 2, 3), keepdim=True))
        return super().step(closure)


class Coin(optim.SGD):
    """Steps as far as a number says that each rank draws for itself."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(random.choice((1.0, 2.0)))
        return super().step(closure)


class Endless(optim.SGD):
    """Iterates until it is stopped, and does not mind what stops it."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            try:
                while True:
                    parameter.grad.add_(0.0)
            except Exception:  # noqa: BLE001
                parameter.grad.zero_()
        return super().step(closure)


class Squaring(optim.SGD):
    """Keeps a matrix of all elements by all elements, once there are more than a few."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.ndim == 1 and len(parameter) > 64:
                torch.linalg.qr(torch.outer(parameter.grad, parameter.grad))
        return super().step(closure)


class Talking(optim.SGD):
    """Averages over ranks by itself."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            dist.all_reduce(parameter.grad)
        return super().step(closure)


class SaysWhen(optim.SGD):
    """Steps only after its train() was called, as optimizers do that average weights."""

    training = False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Any = None) -> Any:
        assert self.training
        return super().step(closure)


DIFFERENT = "it steps a matrix differently from the same numbers in flat pieces"
STATE = "it keeps state that is not the same, element by element, for a matrix and its flat pieces"
SHARED = "what it keeps for all parameters of a group depends on which tensors it steps"
TOO_MUCH = "trying it out takes more work than an optimizer that works element by element needs"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (optim.Adafactor, DIFFERENT),
        (optim.LBFGS, DIFFERENT),
        (NormScaled, DIFFERENT),
        (RowStatistics, DIFFERENT),
        (Tossing, DIFFERENT),
        (lambda p: Grouped([{"params": p, "whole": True}]), DIFFERENT),
        (Distance, SHARED),
        (Projecting, DIFFERENT),
        (FirstComes, f"{DIFFERENT} beside other tensors"),
        (Gathering, STATE),
        (Coin, DIFFERENT),
        (Endless, TOO_MUCH),
        (Squaring, TOO_MUCH),
        (lambda p: NormScaled(p, lr=0.0), DIFFERENT),
        (lambda p: NormScaled(p, lr=1e-9), DIFFERENT),
        (
            lambda p: optim.Muon([each for each in p if each.ndim == 2]),
            "it cannot step a flat piece of a matrix (Value",
        ),
        (optim.SparseAdam, "it could not be tried out on a matrix of its own (RuntimeError: SparseAdam does not"),
        (lambda p: Masked(p, torch.ones(2)), "could not be tried out on a matrix of its own (TypeError: "),
    ],
)
def test_what_needs_whole_matrices_or_cannot_be_tried_is_told(make: Callable[[Any], Any], reason: str) -> None:
    answer = why_not_elementwise(make(list(nn.Linear(2, 2).parameters())), CPU)
    assert answer is not None
    assert reason in answer


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"momentum": 0.9, "weight_decay": 0.1, "maximize": True},
        {"lr": torch.tensor(0.1)},
        {"lr": 0.0},
        {"lr": 1e-9},
    ],
)
@pytest.mark.parametrize("kind", [optim.SGD, unknown(optim.SGD), SaysWhen])
def test_settings_change_nothing_about_it(kind: Any, settings: dict[str, Any]) -> None:
    assert why_not_elementwise(kind(nn.Linear(2, 2).parameters(), **settings), CPU) is None


@pytest.mark.parametrize(
    "settings",
    # The last of them end in no numbers, and in the same places.
    [{"amsgrad": True}, {"lr": torch.tensor(0.1)}, {"weight_decay": 0.1}, {"lr": 123.0, "weight_decay": 123.0}],
)
def test_so_do_those_of_adam(settings: dict[str, Any]) -> None:
    for kind in (optim.AdamW, unknown(optim.AdamW)):
        assert why_not_elementwise(kind(nn.Linear(2, 2).parameters(), **settings), CPU) is None


def test_what_looks_at_more_dims_is_tried_on_them() -> None:
    assert why_not_elementwise(Centring(nn.Linear(2, 2).parameters()), CPU) is None
    assert why_not_elementwise(Centring(nn.Conv2d(2, 2, 2).parameters()), CPU) == DIFFERENT
    assert why_not_elementwise(optim.AdamW(nn.Conv3d(2, 2, 2).parameters()), CPU) is None


def test_a_warm_up_from_zero_hides_nothing() -> None:
    optimizer = NormScaled(nn.Linear(2, 2).parameters(), lr=0.1)
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert why_not_elementwise(optimizer, CPU) == DIFFERENT


def test_collectives_are_refused_before_they_are_sent(worlds: Any) -> None:
    # One rank asks; a collective that went out would find nobody.
    assert worlds(2).run(asked_on_rank_0) == ["it calls collectives of its own", None]


def asked_on_rank_0() -> str | None:
    with get_strategy("ddp") as strategy:
        strategy.setup_environment()
        mine = why_not_elementwise(Talking(nn.Linear(2, 2).parameters()), CPU) if strategy.is_global_zero else None
        strategy.barrier()
        return mine


class Moody(optim.SGD):
    """Works element by element on all ranks but one."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if dist.get_rank() == group["bad_rank"]:
                    parameter.grad.sub_(parameter.grad.mean())
        return super().step(closure)


def set_up_moody(bad_rank: int, later: bool) -> str:
    """Set one up where only optimizers are promised that work element by element."""
    info = dataclasses.replace(DDP, name="careful", capabilities=DDP.capabilities - {Capability.ANY_OPTIMIZER})
    with DDPStrategy(info=info) as strategy:
        module = nn.Linear(2, 2)
        moody = Moody([{"params": module.parameters(), "bad_rank": bad_rank}])
        try:
            if later:
                strategy.setup_module(module)
                strategy.setup_optimizer(moody)
            else:
                strategy.setup_module_and_optimizers(module, [moody])
        except MissingCapability as error:
            return str(error)
        return "taken"


@pytest.mark.parametrize("later", [False, True])
def test_rank_0_judges_for_all(worlds: Any, later: bool) -> None:
    first, second = worlds(2).run(set_up_moody, 0, later)
    assert first == second
    assert f"Moody is not known to, because {DIFFERENT}; take another optimizer" in first
    assert worlds(2).run(set_up_moody, 1, later) == ["taken"] * 2


def test_what_an_optimizer_keeps_outside_of_its_groups_is_tried_too() -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    assert why_not_elementwise(ClippedBy(parameters), CPU) is None
    assert "flat pieces" in str(why_not_elementwise(ClippedBy(parameters, limit=0.1), CPU))
    assert why_not_elementwise(ClippedBy(parameters, limit=lambda: 0.1), CPU) == (
        "it keeps 'limit', which one that is built from its groups' settings would not have"
    )


def test_one_bad_group_is_enough() -> None:
    module = nn.Linear(2, 2)
    good = Grouped([{"params": [module.weight]}, {"params": [module.bias], "lr": 0.3}])
    bad = Grouped([{"params": [module.weight]}, {"params": [module.bias], "whole": True}])
    assert why_not_elementwise(good, CPU) is None
    assert why_not_elementwise(bad, CPU) == DIFFERENT


def test_names_and_schedules_are_no_settings() -> None:
    optimizer = optim.AdamW(nn.Linear(2, 2).named_parameters(), lr=torch.tensor(0.1))
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert why_not_elementwise(optimizer, CPU) is None


def test_nothing_of_the_users_is_touched() -> None:
    module = nn.Linear(2, 2)
    optimizer = Tossing([{"params": [module.weight], "lr": torch.tensor(0.5)}, {"params": [module.bias]}], momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    before = [torch.get_rng_state(), *(p.detach().clone() for p in module.parameters())]
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    groups = repr(optimizer.param_groups)
    python, numpy = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    why_not_elementwise(optimizer, CPU)
    assert all(map(torch.equal, before, [torch.get_rng_state(), *module.parameters()]))
    assert all(map(torch.equal, gradients, [p.grad for p in module.parameters() if p.grad is not None]))
    assert (repr(optimizer.param_groups), optimizer.state) == (groups, {})
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, numpy)  # type: ignore[union-attr]
