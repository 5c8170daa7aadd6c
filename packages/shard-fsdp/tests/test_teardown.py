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


def used_after_teardown(layout: str) -> tuple[list[str], bool]:
    """Call a module, its parts and its optimizer after teardown; return what is said, and whether weights stayed."""
    name, options = LAYOUTS[layout]
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model: Any = Scaled()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        strategy.backward(model(torch.ones(2, 4)).square().mean(), model)
    before = [each.detach().to_local().clone() for each in model.layers.parameters()]
    uses = (lambda: model(torch.ones(2, 4)), lambda: model.layers[0](torch.ones(2, 4)), optimizer.step)
    said = []
    for use in uses:
        with pytest.raises(SetupError) as raised:
            use()
        said.append(str(raised.value))
    optimizer.zero_grad()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(1))]
    optimizer.step()
    now = [each.detach().to_local() for each in model.layers.parameters()]
    return said, all(map(torch.equal, before, now))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_stays_sharded_is_neither_called_nor_stepped(worlds: Any, layout: str) -> None:
    for (called, part, stepped), unchanged in worlds(2).run(used_after_teardown, layout):
        strategy = repr(LAYOUTS[layout][0])
        assert called == part
        assert called.startswith(f"a module was called after strategy {strategy}")
        assert stepped.startswith(f"this SGD holds parameters of a module whose strategy {strategy} was torn down")
        assert unchanged


def test_alone_a_process_goes_on(worlds: Any) -> None:
    assert worlds(1).run(tear_down_alone) == [True]


def tear_down_alone() -> bool:
    with get_strategy("fsdp", accelerator="cpu") as strategy:
        model: Any = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
    before = model(torch.ones(1, 4)).detach()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return not torch.equal(before, model(torch.ones(1, 4)))
