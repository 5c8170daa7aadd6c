"""``optimizer.step()`` is a step of the strategy's, under every strategy."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import oracle

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {"reshard_after_forward": False}),
    "offloaded": ("fsdp_cpu_offload", {}),
    "copies": ("hsdp", {"device_mesh": (2, 1)}),
    "split": ("tp", {"tensor_parallel_size": 1}),
    "stage 0": ("deepspeed", {"stage": 0}),
    "stage 1": ("deepspeed_stage_1", {}),
    "stage 2": ("deepspeed_stage_2", {}),
    "stage 3": ("deepspeed_stage_3", {}),
}
SCALED = ("ddp", "fsdp", "offloaded", "copies")
STEPS = 3


SHARDING = ("fsdp", "offloaded", "stage 1", "stage 2", "stage 3")


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1 - step, 1 + rank, 12).reshape(3, 4)


def train(layout: str, by_hand: bool, precision: str = "32-true") -> Any:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", precision=precision, **options) as strategy:
        module, optimizer = make()
        before = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)  # puts a function of its own in the place of step
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        rank = strategy.distributed_sampler_kwargs["rank"]
        returned = []
        for step in range(STEPS):
            for last in (False, True):
                with strategy.no_backward_sync(model, enabled=not last):
                    loss = model(batch(step, rank)).square().sum()
                    overflows = precision == "16-mixed" and step == 0
                    strategy.backward(loss * 1e6 if overflows else loss, model, denominator=5.0 + rank)
            model(batch(9, rank))  # gathers what the step then changes
            returned.append(optimizer.step() if by_hand else strategy.optimizer_step(optimizer) and None)
            before.step()
            after.step()
            optimizer.zero_grad()
        state = strategy.optimizer_state_dict(optimizer), strategy.module_state_dict(model)
        output = model(batch(9, rank)).detach()
    if layout.startswith("stage") and layout != "stage 0":
        with pytest.raises(SetupError, match="was torn down"):
            optimizer.step()
    else:
        optimizer.step()  # which is its class's again: it finds no gradients
    return state, output, returned


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_by_hand_trains_as_in_plain_pytorch(worlds: Any, layout: str) -> None:
    module, optimizer = make()
    for step in range(STEPS):
        for rank in range(2):
            (2 * module(batch(step, rank)).square().sum() / 22).backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.81
        optimizer.zero_grad()
    for rank, ((_, weights), output, returned) in enumerate(worlds(2).run(train, layout, True)):
        oracle.assert_same_weights(weights, {} if rank else module.state_dict(), 1e-5, elementwise=True)
        torch.testing.assert_close(output, module(batch(9, rank)).detach(), rtol=1e-5, atol=1e-6)
        assert returned == [None] * STEPS


@pytest.mark.parametrize("layout", SCALED)
def test_a_step_by_hand_skips_what_overflowed(worlds: Any, layout: str) -> None:
    by_hand, by_strategy = (worlds(2).run(train, layout, each, "16-mixed") for each in (True, False))
    for (_, weights), output, _ in by_hand:  # weights are rank 0's
        assert output.isfinite().all()
        assert all(each.isfinite().all() for each in weights.values())
    (mine, *_), (theirs, *_) = by_hand[0], by_strategy[0]
    oracle.assert_same_weights(mine[1], theirs[1], 0.0, elementwise=True)
    assert mine[0]["param_groups"] == theirs[0]["param_groups"]


def with_closure(layout: str) -> Any:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        module, optimizer = make()
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch(0, 0)).square().mean()
            strategy.backward(loss, model)
            return loss.detach()

        losses = [optimizer.step(closure).item() for _ in range(STEPS)]
        return losses, strategy.module_state_dict(model)


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "stage 1", "stage 3"])
def test_a_closure_is_taken_by_hand_too(worlds: Any, layout: str) -> None:
    module, optimizer = make()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(batch(0, 0)).square().mean()
        loss.backward()
        return loss.detach()

    losses = [optimizer.step(closure).item() for _ in range(STEPS)]
    for rank, (found, weights) in enumerate(worlds(2).run(with_closure, layout)):
        assert found == pytest.approx(losses, rel=1e-5)
        oracle.assert_same_weights(weights, {} if rank else module.state_dict(), 1e-5, elementwise=True)


def too_early() -> None:
    with get_strategy("ddp", accelerator="cpu") as strategy:
        module, optimizer = make()
        model, _ = strategy.setup_module_and_optimizers(module, [optimizer])
        with strategy.no_backward_sync(model):
            strategy.backward(model(batch(0, strategy.global_rank)).mean(), model)
        with pytest.raises(Exception, match="the last backward was inside no_backward_sync"):
            optimizer.step()


def test_a_step_by_hand_waits_for_gradients_to_be_averaged(worlds: Any) -> None:
    worlds(2).run(too_early)


class Scaled(torch.optim.Optimizer):
    """Steps by other arguments than torch's optimizers, and returns something."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, scale: float = 1.0, *, lr: float = 0.1) -> dict[str, float]:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad, alpha=scale * lr)
        return {"scale": scale}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def customs(step: Any, wraps: bool) -> tuple[Any, int, dict[str, torch.Tensor]]:
    """Step by what takes other arguments, with a function of the user's around it."""
    calls = 0
    with get_strategy("single", accelerator="cpu") as strategy:
        module, _ = make()
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [Scaled(module.parameters())])
        strategy.backward(model(batch(0, 0)).square().mean(), model)
        before: Any = optimizer.step

        def around(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            return before(*args, **kwargs)

        if wraps:
            optimizer.step = around  # type: ignore[method-assign]
        returned = step(optimizer)
        return returned, calls, strategy.module_state_dict(model)


STEPS_OF_ANOTHER_KIND = {
    "nothing": lambda optimizer: optimizer.step(),
    "a number": lambda optimizer: optimizer.step(2.0),
    "a keyword": lambda optimizer: optimizer.step(lr=0.3),
    "another keyword": lambda optimizer: optimizer.step(scale=2.0),
}


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("step", STEPS_OF_ANOTHER_KIND.values(), ids=STEPS_OF_ANOTHER_KIND)
def test_a_step_by_hand_takes_what_its_class_takes_and_returns_that(step: Any, wraps: bool) -> None:
    module, _ = make()
    module(batch(0, 0)).square().mean().backward()
    right = step(Scaled(module.parameters()))
    returned, calls, weights = customs(step, wraps)
    assert (returned, calls) == (right, int(wraps))
    oracle.assert_same_weights(weights, module.state_dict(), 0.0, elementwise=True)


def test_a_copy_steps_by_itself() -> None:
    with get_strategy("single", accelerator="cpu") as strategy:
        module, plain = make()
        _, (optimizer, _) = strategy.setup_module_and_optimizers(module, [Scaled(module.parameters()), plain])
        assert (
            str(inspect.signature(optimizer.step))
            == "(scale: 'float' = 1.0, *, lr: 'float' = 0.1) -> 'dict[str, float]'"
        )
        twin = copy.deepcopy(optimizer)
        for parameter in twin.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        assert twin.step() == {"scale": 1.0}
        with pytest.raises(SetupError, match="SGD was called past"):
            torch.optim.SGD.step(plain)


def reloaded(layout: str, folder: str, own: bool) -> str:
    """Load what torch has saved of an optimizer, on each rank its own or on all rank 0's; return the refusal."""
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model, optimizer = make()
        model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
        strategy.backward(model(batch(0, strategy.global_rank)).square().mean(), model)
        strategy.optimizer_step(optimizer)
        before = [each.clone() for slots in optimizer.state.values() for each in slots.values()]
        file = f"{folder}/{layout}-{strategy.global_rank if own else 0}.pt"
        if own or strategy.is_global_zero:
            torch.save(optimizer.state_dict(), file)
        strategy.barrier()
        refusal = ""
        try:
            optimizer.load_state_dict(torch.load(file, weights_only=False))
        except SetupError as error:
            refusal = str(error)
        after = [each for slots in optimizer.state.values() for each in slots.values()]
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        return refusal


@pytest.mark.parametrize("layout", ["ddp", *SHARDING])
def test_a_rank_loads_no_state_of_another_ranks_shards(worlds: Any, tmp_path: Any, layout: str) -> None:
    assert worlds(2).run(reloaded, layout, str(tmp_path), True) == ["", ""]
    first, second = worlds(2).run(reloaded, layout, str(tmp_path), False)
    assert first == second
    assert ("which holds other shards" in first) == (layout in SHARDING)


class OwnList(torch.optim.Optimizer):
    """Steps from a list of its own, with momentum and decay that it looks up by the parameter and by its ``id``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.2})
        self.mine = [parameter for group in self.param_groups for parameter in group["params"]]
        self.momentum = {parameter: torch.zeros_like(parameter) for parameter in self.mine}
        self.decayed = {id(parameter) for parameter in self.mine}
        self.named = ({"first": self.mine[0]}, "first")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = 0.2 if self.named[0]["first"] is self.param_groups[0]["params"][0] else 0.0
        for parameter in self.mine:
            if parameter.grad is not None:
                decay = 0.1 if id(parameter) in self.decayed else 0.0
                self.momentum[parameter].mul_(0.9).add_(parameter.grad + decay * parameter)
                parameter.sub_(rate * self.momentum[parameter])


def stepped_from_its_list(layout: str) -> Any:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model, _ = make()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [OwnList(model.parameters())])
        for step in range(STEPS):
            strategy.backward(model(batch(step, strategy.global_rank)).square().mean(), model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        return strategy.broadcast(strategy.module_state_dict(model))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_may_keep_its_parameters_where_it_likes(worlds: Any, layout: str) -> None:
    plain, _ = make()
    optimizer = OwnList(plain.parameters())
    for step in range(STEPS):
        losses = [plain(batch(step, rank)).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in worlds(2).run(stepped_from_its_list, layout):
        oracle.assert_same_weights(weights, plain.state_dict(), 1e-6)


class OwnMomentum(torch.optim.Optimizer):
    """Steps whatever stands in its groups, as no optimizer of torch's does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state.setdefault("momentum_buffer", torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.2 * state["momentum_buffer"])


def put_whole_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        whole = torch.arange(float(parameter.numel())).reshape(parameter.shape) / 10
        optimizer.state[parameter]["momentum_buffer"] = whole


def stepped_with_whole_state(layout: str, own: bool) -> Any:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model, optimizer = make()
        if own:
            optimizer = OwnMomentum(model.parameters())
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        for step in range(STEPS):
            strategy.backward(model(batch(step, strategy.global_rank)).square().mean(), model)
            if step != 1:
                put_whole_state(model, optimizer)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
        saved = strategy.optimizer_state_dict(optimizer)
        return strategy.broadcast(strategy.module_state_dict(model)), strategy.broadcast(saved)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("layout", ["ddp", "fsdp", "offloaded", "copies", "split"])
def test_whole_state_may_be_given_by_hand(worlds: Any, layout: str, own: bool) -> None:
    plain, optimizer = make()
    for step in range(STEPS):
        losses = [plain(batch(step, rank)).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        if step != 1:
            put_whole_state(plain, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    for weights, state in worlds(2).run(stepped_with_whole_state, layout, own):
        oracle.assert_same_weights(weights, plain.state_dict(), 1e-6)
        for name, parameter in plain.named_parameters():
            expected = optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(state["state"][name]["momentum_buffer"], expected)
