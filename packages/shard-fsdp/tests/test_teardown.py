"""What a strategy leaves of modules when it is torn down, and itself lives on."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import SetupError, get_strategy

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {"unit_bytes": 1}),
    "hsdp": ("hsdp", {"data_parallel_size": 2}),
    "tp": ("tp", {"tensor_parallel_size": 1, "plan": {}}),
}


class Scaled(nn.Module):
    """Has a parameter that no strategy shards."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scale


def tear_down(layout: str) -> tuple[float, bool]:
    name, options = LAYOUTS[layout]
    strategy = get_strategy(name, accelerator="cpu", **options)
    with strategy:
        model: Any = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        strategy.backward(model(torch.randn(2, 4)).square().mean(), model)
        strategy.optimizer_step(optimizer)
        optimizer.zero_grad()
    (model.scale * 3).backward()  # which a strategy would refuse
    gradient = model.scale.grad.item()
    trained = weakref.ref(model)
    del model, optimizer
    gc.collect()
    freed = trained() is None
    assert strategy.info.name == name  # it is still here
    return gradient, freed


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_strategy_that_was_torn_down_lets_go_of_modules(worlds: Any, layout: str) -> None:
    assert worlds(2).run(tear_down, layout) == [(3.0, True)] * 2


def set_up_again(layout: str) -> str:
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        module: nn.Module = strategy.unwrap(strategy.setup_module(Scaled()))
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        with pytest.raises(SetupError) as raised:
            strategy.setup_module(module)
        return str(raised.value)


def test_what_is_sharded_is_not_set_up_again(worlds: Any) -> None:
    for said in worlds(2).run(set_up_again, "fsdp"):
        assert said.startswith("parameter 'layers.0.weight' is spread over ranks already")
