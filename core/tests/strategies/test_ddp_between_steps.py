"""What changes between the steps of ``ddp``: who trains, and the buffers that forwards change."""

import contextlib
import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from test_ddp import TwoHeads, sines, squares, unwrapped
from torch import nn

from shard_core import get_strategy
from shard_core.testing import models

#: Who trains in each step, by name; all else is frozen. The first line is what setup sees.
SCHEDULES = {
    "unfrozen later": (["left", "right"], ["trunk", "left", "right"], ["left", "right"]),
    "frozen later": (["trunk", "left", "right"], ["left", "right"], ["trunk", "left", "right"]),
    "one for the other": (["left"], ["trunk", "right"], ["left"]),
    "nobody at first": ([], ["left", "right"], ["trunk", "left", "right"]),
}


def freeze_all_but(model: nn.Module, trained: Any) -> None:
    for name, part in model.named_children():
        part.requires_grad_(name in trained)


def training_by_schedule(model: nn.Module, schedule: Any, make: Any, one: Callable[[torch.Tensor], Any]) -> Any:
    """Take steps of three micro-batches, the last of which reaches one head alone; return the weights after each."""
    optimizer = make([{"params": part.parameters(), "lr": 0.1 / (1 + n)} for n, part in enumerate(model.children())])
    seen = []
    for step, (batch, _) in enumerate(models.batches("plain", 4, 24)):
        freeze_all_but(model, schedule[min(step, len(schedule) - 1)] or ["left"])
        one(batch, optimizer)  # type: ignore[call-arg]
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
    return seen


def micro_batches(model: Any, batch: torch.Tensor, backward: Any, deferred: Any) -> None:
    first, second, third = batch.chunk(3)
    with deferred():
        backward(squares(model(first)))
    backward(squares(unwrapped(model).forward(second)))
    backward(sines(model(third)))


def scheduled_plainly(schedule: Any, make: Any) -> Any:
    torch.manual_seed(0)
    model = TwoHeads()

    def one(batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        for share in batch.chunk(2):
            micro_batches(model, share, lambda loss: (loss / 2).backward(), contextlib.nullcontext)
        optimizer.step()
        optimizer.zero_grad()

    return training_by_schedule(model, schedule, make, one)  # type: ignore[arg-type]


def scheduled_under_ddp(options: dict[str, Any], schedule: Any, make: Any) -> Any:
    with get_strategy("ddp", **options) as strategy:
        torch.manual_seed(0)
        made = TwoHeads()
        freeze_all_but(made, schedule[0])
        model = strategy.setup_module(made)

        def one(batch: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
            (share,) = models.share_of(strategy, (batch,))
            deferred = functools.partial(strategy.no_backward_sync, model)
            micro_batches(model, share, functools.partial(strategy.backward, module=model), deferred)
            optimizer.step()
            optimizer.zero_grad()

        return training_by_schedule(made, schedule, make, one)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "make"),
    [
        ({}, torch.optim.AdamW),
        ({"find_unused_parameters": True}, torch.optim.AdamW),
        ({"static_graph": True}, torch.optim.SGD),
        pytest.param({}, torch.optim.SGD, marks=pytest.mark.long),
        pytest.param({"find_unused_parameters": True}, torch.optim.SGD, marks=pytest.mark.long),
        pytest.param({"gradient_as_bucket_view": False}, torch.optim.AdamW, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_what_is_frozen_and_unfrozen_between_steps_trains_as_in_one_process(
    worlds: Any, options: dict[str, Any], make: Any
) -> None:
    for when, schedule in SCHEDULES.items():
        truth = scheduled_plainly(schedule, make)
        for seen in worlds(2).run(scheduled_under_ddp, options, schedule, make):
            torch.testing.assert_close(seen, truth, rtol=1e-4, atol=1e-6, msg=f"{when}: ".__add__)


class Counting(nn.Module):
    """Counts its calls by rank, in buffers of two dtypes, one of which no state dict has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.ones(2, 3), persistent=False)

    def forward(self, inputs: torch.Tensor, rank: int) -> torch.Tensor:
        seen = self.scale.sum()
        self.calls += 1 + 10 * rank
        self.scale *= 1 + rank
        return self.inner(inputs).square().mean() * seen


def buffers_seen(options: dict[str, Any]) -> list[Any]:
    """Return what forwards of each kind began with."""
    with get_strategy("ddp", **options) as strategy:
        rank = strategy.global_rank
        made = Counting()
        made.calls += 100 * rank
        model, _ = strategy.setup_module_and_optimizers(made, [torch.optim.SGD(made.parameters(), lr=0.1)])
        seen = [made.calls.item()]
        made.register_forward_pre_hook(
            lambda module, args: seen.append((module.calls.item(), module.scale.sum().item()))
        )
        inputs = torch.ones(2, 6)
        strategy.backward(model(inputs, rank), model)
        with strategy.no_backward_sync(model):
            strategy.backward(model(inputs, rank), model)
        with torch.no_grad():
            model(inputs, rank)
        first, second = model(inputs, rank), model(inputs, rank)
        strategy.backward(first, model)
        strategy.backward(second, model)
        return seen


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
def test_buffers_are_those_of_rank_zero_before_each_forward(worlds: Any, option: str) -> None:
    for seen in worlds(2).run(buffers_seen, {option: True}):
        assert seen == [0, *((calls, 6.0) for calls in range(5))]


def test_buffers_stay_where_they_are_if_nobody_wants_them_sent(worlds: Any) -> None:
    first, second = worlds(2).run(buffers_seen, {"broadcast_buffers": False})
    assert first == [0, *((calls, 6.0) for calls in range(5))]
    assert second == [0, *((11 * calls, 6.0 * 2**calls) for calls in range(5))]


def centralize(optimizer: torch.optim.Optimizer, backward: Callable[[], object]) -> None:
    """Assign gradients other data after each backward, of which two steps have one each, and two steps two."""
    (group,) = optimizer.param_groups
    for step in range(4):
        for _ in range(1 + step // 2):
            backward()
            for parameter in group["params"]:
                parameter.grad.data = parameter.grad.data - 0.3 * parameter.grad.data.mean()
        optimizer.step()
        optimizer.zero_grad(set_to_none=bool(step % 2))


def mean_square(model: nn.Module, rank: int) -> torch.Tensor:
    return torch.as_tensor(model(torch.full((2, 4), rank + 1.0)).square().mean())


def centralized(as_views: bool) -> list[float]:
    with get_strategy("ddp", gradient_as_bucket_view=as_views) as strategy:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
        )
        centralize(optimizer, lambda: strategy.backward(mean_square(model, strategy.global_rank), model))
        return strategy.unwrap(model).weight.flatten().tolist()


@pytest.mark.parametrize("as_views", [True, False])
def test_gradients_that_are_assigned_other_data_go_on_in_their_messages(worlds: Any, as_views: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    centralize(optimizer, lambda: ((mean_square(plain, 0) + mean_square(plain, 1)) / 2).backward())
    expected = pytest.approx(plain.weight.flatten().tolist(), abs=1e-6)
    assert worlds(2).run(centralized, as_views) == [expected] * 2


class Normed(nn.Module):
    """Normalizes by statistics of its rank's batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 4), nn.BatchNorm1d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layer(inputs))


def rows_of(step: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1 - rank, 1 + step, 24).reshape(4, 6).sin()


def evaluating_alone(context: Any, evaluator: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train, and evaluate on one rank between steps; return what that saw, and the weights at the end."""
    with get_strategy("ddp") as strategy:
        torch.manual_seed(0)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
        outputs = []
        for step in range(3):
            for last in (False, True):
                with strategy.no_backward_sync(model, enabled=not last):
                    strategy.backward(model(rows_of(step, strategy.global_rank)).square().mean(), model)
            optimizer.step()
            optimizer.zero_grad()
            if strategy.global_rank == evaluator:
                model.eval()
                with context():
                    outputs.extend(model(rows_of(9, batch)) for batch in range(2))
                model.train()
            strategy.barrier()
        return outputs, strategy.broadcast({name: each.clone() for name, each in model.state_dict().items()})


@pytest.mark.parametrize("evaluator", [0, 1])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_one_rank_may_evaluate_alone(worlds: Any, context: Any, evaluator: int) -> None:
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    outputs = []
    for step in range(3):
        for _ in range(2):
            before = {name: each.clone() for name, each in model.named_buffers()}
            (model(rows_of(step, 1)).square().mean() / 2).backward()
            model.load_state_dict(before, strict=False)  # the buffers are those of rank 0
            (model(rows_of(step, 0)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            outputs.extend(model(rows_of(9, batch)) for batch in range(2))
        model.train()
    for rank, (seen, weights) in enumerate(worlds(2).run(evaluating_alone, context, evaluator)):
        torch.testing.assert_close(seen, outputs if rank == evaluator else [])
        torch.testing.assert_close(weights, {f"module.{name}": each for name, each in model.state_dict().items()})


class Turned(nn.Module):
    """Has a weight of one column, laid out row by row with a stride of eight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, 8).t().clone())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.weight


def step_turned() -> list[list[float]]:
    with get_strategy("ddp") as strategy:
        made = Turned()
        assert made.weight.stride() == (1, 8)
        model, (optimizer,) = strategy.setup_module_and_optimizers(made, [torch.optim.SGD(made.parameters(), lr=0.5)])
        strategy.backward(model(torch.ones(2, 8)).mean(), model)
        optimizer.step()
        return made.weight.tolist()


def test_a_dim_of_one_element_may_have_any_stride(worlds: Any) -> None:
    assert worlds(2).run(step_turned) == [[[0.5]] * 8] * 2


class Leveled(nn.Module):
    """Computes with a buffer that its forward has changed by what its rank sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("level", torch.ones(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.level.mul_(0.5).add_(inputs.mean())
        return self.layer(inputs) * self.level


def another_backward_first() -> torch.Tensor | None:
    """Return gradients of a loss whose forward came before another module's backward and step."""
    with get_strategy("ddp") as strategy:
        torch.manual_seed(0)
        first, second = Leveled(), nn.Linear(6, 4)
        model = strategy.setup_module(first)
        other, (optimizer,) = strategy.setup_module_and_optimizers(
            second, [torch.optim.SGD(second.parameters(), lr=0.1)]
        )
        inputs = rows_of(1, 3 * strategy.global_rank) + strategy.global_rank
        loss = model(inputs).square().mean()
        strategy.backward(other(inputs).square().mean(), other)
        optimizer.step()
        strategy.backward(loss, model)
        return first.layer.weight.grad


def test_buffers_that_a_graph_reads_stay_until_its_step(worlds: Any) -> None:
    torch.manual_seed(0)
    model = Leveled()
    for rank in range(2):
        model.level.fill_(1.0)
        (model(rows_of(1, 3 * rank) + rank).square().mean() / 2).backward()
    for gradient in worlds(2).run(another_backward_first):
        torch.testing.assert_close(gradient, model.layer.weight.grad)


def skipping(evaluator: int) -> tuple[list[bool], list[torch.Tensor], torch.Tensor]:
    """Take steps of which the scaler skips some, evaluating on one rank after each; return its outputs, and buffers."""
    with get_strategy("ddp", precision="16-mixed", timeout=timedelta(seconds=20)) as strategy:
        torch.manual_seed(0)
        model = Normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, _ = strategy.setup_module_and_optimizers(model, [optimizer])
        taken, outputs = [], []
        for step in range(4):
            loss = model(rows_of(step, strategy.global_rank)).square().mean()
            strategy.backward(loss * (1e38 if step % 2 == 0 else 1e-3), model)
            taken.append(strategy.optimizer_step(optimizer) if step < 2 else optimizer.step() is None)
            optimizer.zero_grad()
            if strategy.global_rank == evaluator:
                model.eval()
                with torch.no_grad():
                    outputs.append(model(rows_of(9, 0)).float())
                model.train()
            strategy.barrier()
        buffers = torch.cat([each.double().flatten() for each in strategy.unwrap(model).buffers()])
        return taken, outputs, buffers


@pytest.mark.parametrize("evaluator", [0, 1])
def test_one_rank_may_evaluate_alone_after_a_skipped_step(worlds: Any, evaluator: int) -> None:
    first, second = worlds(2).run(skipping, evaluator)
    assert first[0] == second[0] == [False, True, True, True]
    assert len((first, second)[evaluator][1]) == 4
    torch.testing.assert_close(first[2], second[2], rtol=0, atol=0)


def after_teardown(options: dict[str, Any]) -> list[torch.Tensor]:
    """Train on one rank alone what was set up, past the end of its strategy; return its weights and buffers."""
    with get_strategy("ddp", **options) as strategy:
        torch.manual_seed(0)
        made = Normed()
        optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
        model, _ = strategy.setup_module_and_optimizers(made, [optimizer])
        rank = strategy.global_rank
        strategy.backward(model(rows_of(0, 0)).square().mean(), model)
        optimizer.step()
        optimizer.zero_grad()
    for step in range(1, 3 if rank else 1):
        model(rows_of(step, 0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in made.state_dict().values()]


@pytest.mark.parametrize("option", ["gradient_as_bucket_view", "static_graph"])
def test_after_teardown_a_rank_trains_on_alone(worlds: Any, option: str) -> None:
    torch.manual_seed(0)
    model = Normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth = []
    for step in range(3):
        optimizer.zero_grad()
        model(rows_of(step, 0)).square().mean().backward()
        optimizer.step()
        truth.append([each.detach().clone() for each in model.state_dict().values()])
    first, second = worlds(2).run(after_teardown, {option: True})
    torch.testing.assert_close(first, truth[0])
    torch.testing.assert_close(second, truth[2])
