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


def training_on() -> list[float]:
    """Return the outputs after a refusal, and after a step that follows it."""
    with get_strategy("deepspeed", **GATHERS) as strategy:
        strategy.seed_everything(0)
        model: Any = Experts()
        model, (optimizer,) = strategy.setup_module_and_optimizers(
            model, [torch.optim.SGD(model.parameters(), lr=0.125)]
        )
        with pytest.raises(SetupError, match="ranks run different parts"):
            model(torch.ones(2, 4), (0, None)[strategy.global_rank])
        losses = []
        for _ in range(2):
            loss = model(torch.ones(2, 4), 1).sum()
            strategy.backward(loss, model)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        return losses


def test_training_goes_on_after_a_refusal(worlds: Any) -> None:
    torch.manual_seed(0)
    plain = Experts()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
    truth = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = plain(torch.ones(2, 4), 1).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        truth.append(float(loss.detach()))
    assert worlds(2).run(training_on) == [pytest.approx(truth, rel=1e-5)] * 2


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
