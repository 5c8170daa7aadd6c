"""Parameters that one loss reaches and the next does not, under ``find_unused_parameters=True``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import models


class MayAdd(nn.Module):
    """A layer, and others that a call may ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 6)
        self.others = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, inputs: torch.Tensor, *others: int) -> torch.Tensor:
        hidden = self.always(inputs)
        for which in others:
            hidden = hidden + self.others[which](inputs)
        return hidden


def gradients_after_others_were_zeroed(by_module: bool, options: dict[str, Any]) -> list[torch.Tensor | None]:
    with get_strategy("ddp", accelerator="cpu", find_unused_parameters=True, **options) as strategy:
        torch.manual_seed(0)
        model = strategy.setup_module(MayAdd())
        ((batch, _),) = models.batches("plain", 1, 12)
        (share,) = models.share_of(strategy, (batch,))
        with strategy.no_backward_sync(model):
            strategy.backward(model(share, 0, 1).square().sum(), model)
        if by_module:
            model.zero_grad()
        else:
            for parameter in model.parameters():
                parameter.grad = None
        strategy.backward(model(share, *[1] * strategy.global_rank).square().sum(), model)
        return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
@pytest.mark.parametrize("by_module", [True, False], ids=["zero_grad", "by hand"])
def test_what_was_used_before_gradients_were_zeroed_is_unused_after(
    worlds: Any, by_module: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = MayAdd()
    ((batch, _),) = models.batches("plain", 1, 12)
    for rank, share in enumerate(batch.chunk(2)):
        (model(share, *[1] * rank).square().sum() / 2).backward()
    truth = [parameter.grad for parameter in model.parameters()]
    for each in worlds(2).run(gradients_after_others_were_zeroed, by_module, options):
        torch.testing.assert_close(each, truth, rtol=1e-5, atol=1e-7)


def a_loss_for_each_part() -> list[torch.Tensor | None]:
    """Go backward through losses that reach all parameters together, in an order of the rank's own."""
    with get_strategy("ddp", accelerator="cpu") as strategy:
        torch.manual_seed(0)
        model = strategy.setup_module(MayAdd())
        ((batch, _),) = models.batches("plain", 1, 12)
        (share,) = models.share_of(strategy, (batch,))
        for place, which in enumerate((0, 1) if strategy.global_rank else (1, 0)):
            with strategy.no_backward_sync(model, enabled=place == 0):
                strategy.backward(model(share, which).square().sum(), model)
        return [parameter.grad for parameter in model.parameters()]


def test_losses_that_reach_all_together_are_averaged_with_the_last(worlds: Any) -> None:
    torch.manual_seed(0)
    model = MayAdd()
    ((batch, _),) = models.batches("plain", 1, 12)
    for share in batch.chunk(2):
        for which in range(2):
            (model(share, which).square().sum() / 2).backward()
    truth = [parameter.grad for parameter in model.parameters()]
    for each in worlds(2).run(a_loss_for_each_part):
        torch.testing.assert_close(each, truth, rtol=1e-5, atol=1e-7)
