"""Optimizers are known by what they do to a matrix and to its pieces."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

from shard_core.elementwise import why_not_elementwise

CPU = torch.device("cpu")


@pytest.mark.parametrize("fused_or_not", [{}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad])
def test_common_optimizers_work_element_by_element(kind: Any, fused_or_not: dict[str, bool]) -> None:
    assert why_not_elementwise(kind(nn.Linear(2, 2).parameters(), **fused_or_not), CPU) is None


@pytest.mark.parametrize(
    "kind", [optim.Adadelta, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop]
)
def test_so_do_the_less_common(kind: Any) -> None:
    assert why_not_elementwise(kind(nn.Linear(2, 2).parameters()), CPU) is None


class NormScaled(optim.SGD):
    """Divides each gradient by its norm, as LARS and LAMB do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
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
    """Asks for what no settings tell."""

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


DIFFERENT = "it steps a matrix differently from the same numbers in flat pieces"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (optim.Adafactor, DIFFERENT),
        (optim.LBFGS, DIFFERENT),
        (NormScaled, DIFFERENT),
        (RowStatistics, DIFFERENT),
        (Tossing, DIFFERENT),
        (lambda p: Grouped([{"params": p, "whole": True}]), DIFFERENT),
        (
            lambda p: optim.Muon([each for each in p if each.ndim == 2]),
            "it cannot step a flat piece of a matrix (Value",
        ),
        (optim.SparseAdam, "it could not be tried out on a matrix of its own (RuntimeError: SparseAdam does not"),
        (lambda p: Masked(p, torch.ones(2)), "could not be tried out on a matrix of its own (TypeError: "),
    ],
)
def test_what_needs_whole_matrices_or_cannot_be_tried_is_told(make: Callable[[Any], Any], reason: str) -> None:
    told = why_not_elementwise(make(list(nn.Linear(2, 2).parameters())), CPU)
    assert told is not None
    assert reason in told


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
