"""What users write to the parts in ``optimizer.param_groups`` counts where it would in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy
from shard_core.testing import whole_weights


def _in_place(part: torch.Tensor) -> None:
    with torch.no_grad():
        part.mul_(0.5)


def _through_data(part: torch.Tensor) -> None:
    part.data.mul_(0.5)


def _assign(part: torch.Tensor) -> None:
    part.data = part.data * 0.5


def _larger_ones(part: torch.Tensor) -> None:
    part.data.clamp_(max=0.3)


WRITES = (_in_place, _through_data, _assign, _larger_ones)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], object],
    write: Callable[[torch.Tensor], None],
    after: str,
) -> list[float]:
    """Take three steps, writing to the optimizer's parameters after the step, or between two backwards of it."""
    losses = []
    for _ in range(3):
        for micro_batch in range(2):
            loss = model(torch.ones(2, 4)).square().mean()
            losses.append(loss.item())
            backward(loss)
            if after == "step" and micro_batch:
                optimizer.step()
                optimizer.zero_grad()
            if (after == "step") == bool(micro_batch):
                for group in optimizer.param_groups:
                    for part in group["params"]:
                        write(part)
        if after == "backward":
            optimizer.step()
            optimizer.zero_grad()
    return losses


def trained(stage: int, write: Callable[[torch.Tensor], None], after: str) -> Any:
    """Return losses and weights under DeepSpeed."""
    with get_strategy("deepspeed", stage=stage) as strategy:
        model = _model()
        model, optimizer = strategy.setup_module_and_optimizers(
            model, [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]
        )
        (optimizer,) = optimizer
        losses = _train(model, optimizer, lambda loss: strategy.backward(loss, model), write, after)
        return losses, whole_weights(strategy, model)


@pytest.mark.parametrize("after", ["step", "backward"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_counts_from_the_next_forward_on(
    worlds: Any, stage: int, write: Callable[[torch.Tensor], None], after: str
) -> None:
    plain = _model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    expected = _train(plain, optimizer, torch.Tensor.backward, write, after)
    for losses, weights in worlds(2).run(trained, stage, write, after):
        assert losses == pytest.approx(expected, abs=1e-6)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0)


def rounded(stage: int) -> Any:
    """Write to parts, and to the module through data, where what computes is a rounded copy."""
    with get_strategy("deepspeed", stage=stage, precision="bf16-true") as strategy:
        model = _model()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.5)])
        for part in optimizer.param_groups[0]["params"]:
            part.data.fill_(1 + 2**-10)  # which bfloat16 rounds off
        model(torch.ones(2, 4))
        seen = [part.tolist() for part in optimizer.param_groups[0]["params"]]
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
        return seen, whole_weights(strategy, model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rounded_copy_takes_it_and_gives_nothing_back(worlds: Any, stage: int) -> None:
    for seen, weights in worlds(2).run(rounded, stage):
        assert {value for part in seen for value in part} == {1 + 2**-10}
        assert all(bool((each == 0.5).all()) for each in weights.values())


def between(stage: int, write: Callable[[torch.Tensor], None]) -> str:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model = _model()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        loss = model(torch.ones(2, 4)).sum()
        for part in optimizer.param_groups[0]["params"]:
            write(part)
        with pytest.raises(SetupError) as refusal:
            strategy.backward(loss, model)
        return str(refusal.value)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_between_a_forward_and_its_backward_it_is_refused_by_all(
    worlds: Any, stage: int, write: Callable[[torch.Tensor], None]
) -> None:
    first, second = worlds(2).run(between, stage, write)
    assert first == second
    assert "between a forward and its backward" in first


def looked_at(stage: int) -> list[float]:
    """Look at parts' data, which writes nothing."""
    with get_strategy("deepspeed", stage=stage) as strategy:
        model = _model()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 4)).square().mean()
            assert all(bool(part.data.isfinite().all()) for part in optimizer.param_groups[0]["params"])
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            losses.append(loss.item())
        parts = optimizer.param_groups[0]["params"]
        assert all(bool(part.data.isfinite().all()) and part.asked_for for part in parts)
        model(torch.ones(2, 4))
        assert not any(part.asked_for for part in parts), "ranks would ask one another before each forward"
        return losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_looks_only_is_not_refused(worlds: Any, stage: int) -> None:
    first, second = worlds(2).run(looked_at, stage)
    assert first == second
    assert first[1] < first[0]


class ByData(torch.optim.SGD):
    """Looks ahead, as sharpness-aware optimizers do, and goes back by assigning data within its step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parts = [part for group in self.param_groups for part in group["params"]]
        before = [part.data.clone() for part in parts]
        for part in parts:
            part.data = part.data + 0.1
        with torch.enable_grad():
            loss = closure() if closure else None
        for part, values in zip(parts, before, strict=True):
            part.data = values
        super().step()
        return loss


def _ahead(model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[torch.Tensor], object]) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        backward(loss)
        return loss

    return [float(optimizer.step(closure)) for _ in range(3)]  # type: ignore[arg-type]


def stepped_ahead(stage: int) -> Any:
    with get_strategy("deepspeed", stage=stage) as strategy:
        model = _model()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [ByData(model.parameters(), lr=0.1)])
        return _ahead(model, optimizer, lambda loss: strategy.backward(loss, model)), whole_weights(strategy, model)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_closure_computes_with_what_its_step_has_assigned(worlds: Any, stage: int) -> None:
    plain = _model()
    expected = _ahead(plain, ByData(plain.parameters(), lr=0.1), torch.Tensor.backward)
    for losses, weights in worlds(2).run(stepped_ahead, stage):
        assert losses == pytest.approx(expected, abs=1e-6)
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=0)


def _grad_in_place(part: torch.Tensor) -> None:
    assert part.grad is not None
    part.grad.mul_(3)


def _grad_through_data(part: torch.Tensor) -> None:
    assert part.grad is not None
    part.grad.data.mul_(3)


def _grad_given_data(part: torch.Tensor) -> None:
    assert part.grad is not None
    part.grad.data = part.grad.data * 3


def _another_grad(part: torch.Tensor) -> None:
    assert part.grad is not None
    part.grad = part.grad * 3


def _step_with_gradients(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Callable[[torch.Tensor], object],
    clip: Callable[[], torch.Tensor],
    write: Callable[[torch.Tensor], None],
) -> list[float]:
    """Take three steps of two backwards, changing gradients after each; return the norms."""
    norms = []
    for step in range(3):
        for micro_batch in range(2):
            backward(model(torch.full((2, 4), 1.0 + step + micro_batch)).square().mean())
            for group in optimizer.param_groups:
                for part in group["params"]:
                    write(part)
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def stepped_with_gradients(stage: int, write: Callable[[torch.Tensor], None], options: dict[str, Any]) -> Any:
    with get_strategy("deepspeed", stage=stage, **options) as strategy:
        model = _model()
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            model, [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)]
        )
        norms = _step_with_gradients(
            model,
            optimizer,
            lambda loss: strategy.backward(loss, model),
            lambda: strategy.clip_gradients_norm(model, optimizer, 1.0),
            write,
        )
        return norms, whole_weights(strategy, model)


@pytest.mark.parametrize("write", [_grad_in_place, _grad_through_data, _grad_given_data, _another_grad])
@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (3, {}), (3, {"param_persistence_threshold": 0})])
def test_changed_gradients_of_parts_are_stepped(
    worlds: Any, stage: int, options: dict[str, Any], write: Callable[[torch.Tensor], None]
) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    expected = _step_with_gradients(
        model, optimizer, torch.Tensor.backward, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), write
    )
    for norms, weights in worlds(2).run(stepped_with_gradients, stage, write, options):
        assert norms == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(weights, model.state_dict())
