"""Layers that only some ranks come to are refused by all of them, and nothing hangs or is mixed up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy

GATHERS: dict[str, Any] = {"stage": 3, "param_persistence_threshold": 0}
SENDS: dict[str, Any] = {"stage": 2, "reduce_bucket_size": 1}


class Experts(nn.Module):
    """Two layers of one size, of which each rank may take its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, taken: int | None) -> torch.Tensor:
        x = self.inlet(x)
        return x if taken is None else self.experts[taken](x)


class Heads(Experts):
    """Runs both layers; each rank may take the loss of one."""

    def forward(self, x: torch.Tensor, taken: int | None) -> torch.Tensor:
        x = self.inlet(x)
        both = [layer(x) for layer in self.experts]
        return x if taken is None else both[taken]


Taken = tuple[int | None, int | None]


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have DeepSpeed look for no other device."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")


def refusal(options: dict[str, Any], kind: type[nn.Module], taken: Taken) -> str:
    """Return the strategy's error where each rank takes its own."""
    with get_strategy("deepspeed", **options) as strategy:
        model = strategy.setup_module(kind())
        with pytest.raises(SetupError) as refused:
            strategy.backward(model(torch.ones(2, 4), taken[strategy.global_rank]).sum(), model)
        return str(refused.value)


@pytest.mark.parametrize("taken", [(0, 1), (0, None), (None, 1)])
@pytest.mark.parametrize("options", [GATHERS, SENDS], ids=["gathers", "sends"])
@pytest.mark.parametrize("kind", [Experts, Heads])
def test_layers_that_only_some_ranks_come_to_are_refused_by_all(
    worlds: Any, options: dict[str, Any], kind: type[nn.Module], taken: Taken
) -> None:
    first, second = worlds(2).run(refusal, options, kind, taken)
    assert first == second
    assert "ranks run different parts of a module" in first


class Between(Experts):
    """Has a layer behind those that each rank may take, whose gradients are sent before theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.outlet = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, taken: int | None) -> torch.Tensor:
        out: torch.Tensor = self.outlet(super().forward(x, taken))
        return out


def training_on(options: dict[str, Any]) -> list[float]:
    """Return the losses after a refusal, and after a step that follows it."""
    with get_strategy("deepspeed", **options) as strategy:
        strategy.seed_everything(0)
        model: Any = Between()
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            model, [torch.optim.SGD(model.parameters(), lr=0.125)]
        )
        with pytest.raises(SetupError, match="ranks run different parts"):
            strategy.backward(model(torch.ones(2, 4), (0, None)[strategy.global_rank]).sum(), model)
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 4), 1).sum()
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


@pytest.mark.parametrize("options", [GATHERS, SENDS, SENDS | {"stage": 1}], ids=["gathers", "sends", "stage 1"])
def test_training_goes_on_after_a_refusal(worlds: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Between()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    truth = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(torch.ones(2, 4), 1).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        truth.append(float(loss.detach()))
    assert worlds(2).run(training_on, options) == [pytest.approx(truth, rel=1e-5)] * 2


def gradients_after_zeroed(options: dict[str, Any]) -> Any:
    """Return the gradients of a backward whose earlier micro-batches were thrown away."""
    with get_strategy("deepspeed", **options) as strategy:
        strategy.seed_everything(0)
        model: Any = Experts()
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        with strategy.no_backward_sync(model):
            strategy.backward(model(torch.ones(2, 4), 1).sum(), model)
        optimizer.zero_grad()
        strategy.backward(model(torch.ones(2, 4), (None, 1)[strategy.global_rank]).sum(), model)
        return [each.tolist() for each in strategy.module_gradients(model).values() if each is not None]


@pytest.mark.parametrize("options", [{"stage": 0}, {"stage": 1, "overlap_comm": False}], ids=["stage 0", "stage 1"])
def test_what_one_rank_alone_uses_after_zeroed_gradients_is_averaged(worlds: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Experts()
    for taken in (None, 1):
        (plain(torch.ones(2, 4), taken).sum() / 2).backward()
    truth = [each.grad.tolist() for each in plain.parameters() if each.grad is not None]
    found, _ = worlds(2).run(gradients_after_zeroed, options)
    for mine, own in zip(found, truth, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(own))


class Returned:
    """What a forward returns, with a weight of the model's."""

    def __init__(self, out: torch.Tensor, weight: torch.Tensor) -> None:
        self.out, self.weight = out, weight


class ShowsAWeight(Experts):
    """Returns an object that holds a weight."""

    def forward(self, x: torch.Tensor, taken: int | None) -> Any:
        return Returned(super().forward(x, taken), self.inlet.weight)


def hooks_on_weights() -> list[int]:
    """Return how many hooks the weights have after forwards."""
    with get_strategy("deepspeed", stage=3) as strategy:
        model = strategy.setup_module(ShowsAWeight())
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(2, 4), 0)
        return [len(each._backward_hooks or ()) for each in model.parameters()]


def test_weights_that_are_returned_gather_no_hooks(worlds: Any) -> None:
    for found in worlds(2).run(hooks_on_weights):
        assert not any(found)


def gradient_of_the_frozen() -> Any:
    """Return the gradients where one rank alone reaches what was frozen since its forward."""
    with get_strategy("deepspeed", stage=1, overlap_comm=False) as strategy:
        strategy.seed_everything(0)
        model: Any = Experts()
        model, _ = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        loss = model(torch.ones(2, 4), (0, None)[strategy.global_rank]).sum()
        for parameter in strategy.unwrap(model).experts[0].parameters():
            parameter.requires_grad_(False)
        strategy.backward(loss, model)
        return {name: each.tolist() for name, each in strategy.module_gradients(model).items()}


def test_what_one_rank_has_frozen_since_its_forward_is_not_mixed_up(worlds: Any) -> None:
    torch.manual_seed(0)
    plain = Experts()
    for taken in (0, None):
        (plain(torch.ones(2, 4), taken).sum() / 2).backward()
    found, _ = worlds(2).run(gradient_of_the_frozen)
    truth = {name: each.grad.tolist() for name, each in plain.inlet.named_parameters(prefix="inlet")}
    assert set(found) == set(truth)
    for name, own in truth.items():
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(own))
