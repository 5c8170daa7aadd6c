"""``loss.backward()`` trains as in plain PyTorch, or a sentence says why not, whatever it stands beside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle

#: Copies of shards, beside shards of one copy.
LAYOUTS: dict[str, dict[str, Any]] = {"fsdp": {}, "fsdp_cpu_offload": {}, "hsdp": {"device_mesh": (2, 1)}}

#: What a loop does with ``strategy``, None in plain PyTorch, a model, an optimizer and what gives the next batch.
Loop = Callable[[Any, nn.Module, torch.optim.Optimizer, Callable[[], torch.Tensor]], None]


class Branches(nn.Module):
    """Two branches of the same shape, of which a forward may take one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor, which: str = "both") -> torch.Tensor:
        x = torch.tanh(self.first(x)) if which != "second" else x
        return self.second(x) if which != "first" else x


def deferred(strategy: Any, model: nn.Module) -> Any:
    return strategy.no_backward_sync(model)


def backward(strategy: Any, model: nn.Module, x: torch.Tensor, which: str = "both") -> None:
    strategy.backward(model(x, which).square().mean(), model)


def interrupted(strategy: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Go on after an exception that has ended ``loss.backward()``."""
    del strategy

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError(gradient.shape)

    output = model(batch())
    output.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        output.square().mean().backward()
    optimizer.zero_grad()
    model(batch()).square().mean().backward()


def thrown_away(strategy: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Throw away what ``loss.backward()`` has left inside ``no_backward_sync``."""
    if strategy is None:
        batch()
    else:
        with deferred(strategy, model):
            model(batch()).square().mean().backward()
    optimizer.zero_grad()
    model(batch()).square().mean().backward()


def added_up(strategy: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Add up what one backward defers and the next sends, both of them plain."""
    del optimizer
    if strategy is None:
        model(batch()).square().mean().backward()
    else:
        with deferred(strategy, model):
            model(batch()).square().mean().backward()
    model(batch()).square().mean().backward()


def thrown_away_compiled(strategy: Any, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    """Throw away what the strategy has deferred, before ``loss.backward()`` through a module that was compiled."""
    compiled = torch.compile(model, backend="eager")
    x = batch()
    if strategy is not None:
        with deferred(strategy, model):
            strategy.backward(compiled(x).square().mean(), model)
    optimizer.zero_grad()
    compiled(batch()).square().mean().backward()
    loss = compiled(batch()).square().mean()
    if strategy is None:
        loss.backward()
    else:
        strategy.backward(loss, model)


TRAINS: dict[str, Loop] = {"interrupted": interrupted, "thrown away": thrown_away, "added up": added_up}
TRAINS["compiled"] = thrown_away_compiled


def trained(name: str, loop: str) -> dict[str, torch.Tensor]:
    with get_strategy(name, unit_bytes=1, precision="64-true", **LAYOUTS[name]) as strategy:
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for x in _batches(strategy.global_rank):
            TRAINS[loop](strategy, model, optimizer, x)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return strategy.module_state_dict(model)


def _batches(rank: int) -> list[Callable[[], torch.Tensor]]:
    """Return for each step what gives one batch after the other."""
    drawn = [torch.linspace(-1, 1 + n, 8, dtype=torch.float64).reshape(2, 4) * (1 + rank) for n in range(9)]
    return [functools.partial(next, iter(drawn[3 * step : 3 * step + 3])) for step in range(3)]


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("loop", TRAINS)
def test_trains_as_in_plain_pytorch(worlds: Any, name: str, loop: str) -> None:
    plain = Branches()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for batches in zip(*map(_batches, range(2)), strict=True):
        gradients = []
        for batch in batches:
            optimizer.zero_grad()
            TRAINS[loop](None, plain, optimizer, batch)
            gradients.append([parameter.grad.clone() for parameter in plain.parameters() if parameter.grad is not None])
        for parameter, *each in zip(plain.parameters(), *gradients, strict=True):
            parameter.grad = sum(each) / 2
        optimizer.step()
    oracle.assert_same_weights(worlds(2).run(trained, name, loop)[0], plain.state_dict(), 1e-12)


def refused(name: str, case: str) -> tuple[str, bool]:
    """Return the refusal, and whether the next step trains."""
    with get_strategy(name, unit_bytes=1, precision="64-true", **LAYOUTS[name]) as strategy:
        model = Branches()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.5)])
        x = torch.ones(2, 4, dtype=torch.float64)
        before = strategy.module_state_dict(model)
        text = ""
        try:
            if case == "one branch after the other":
                with deferred(strategy, model):
                    backward(strategy, model, x, "first")
                model(x, "second").square().mean().backward()
            elif case == "stepped inside":
                with deferred(strategy, model):
                    model(x).square().mean().backward()
            else:
                kept: list[torch.Tensor] = []
                hook = strategy.unwrap(model).first.register_forward_hook(lambda *given: kept.append(given[2]))
                model(x)
                hook.remove()
                kept[0].square().mean().backward()
            strategy.optimizer_step(optimizer)
        except SetupError as error:
            text = str(error)
        after = strategy.module_state_dict(model)
        assert all(torch.equal(before[key], after[key]) for key in before)
        optimizer.zero_grad()
        backward(strategy, model, x)
        strategy.optimizer_step(optimizer)
        trained = strategy.module_state_dict(model)
        return text, not any(torch.equal(before[key], trained[key]) for key in before)


@pytest.mark.parametrize(
    ("name", "case", "message"),
    [
        ("hsdp", "one branch after the other", "micro-batches of one step reached different parameters of"),
        ("fsdp", "stepped inside", "has waited on its rank since a backward inside no_backward_sync()"),
        ("hsdp", "stepped inside", "has waited on its rank since a backward inside no_backward_sync()"),
        ("fsdp", "past the output", "but not through what its forward has returned"),
        ("hsdp", "past the output", "but not through what its forward has returned"),
    ],
)
def test_what_would_be_lost_or_mixed_up_is_refused(worlds: Any, name: str, case: str, message: str) -> None:
    for text, goes_on in worlds(2).run(refused, name, case):
        assert message in text
        assert goes_on
