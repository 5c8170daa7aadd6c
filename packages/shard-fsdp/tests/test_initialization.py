"""Modules built inside module_init_context have the values of a plain build, and no rank holds them whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import CannotReplay, SetupError, get_strategy
from shard_core.testing import models


class Peculiar(nn.Module):
    """Everything constructors do besides nn's own initialisation."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        with torch.no_grad():
            self.layers[0].weight[2:4].mul_(3.0)
            self.layers[1].bias.data.copy_(torch.linspace(-1, 1, 6))
        nn.init.trunc_normal_(self.layers[1].weight, std=0.3, a=-0.4, b=0.4)
        self.register_buffer("table", torch.outer(torch.arange(4.0), torch.tensor([0.5, 2.0])), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.plain = torch.full((3,), 2.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) * self.gain).sum() + self.table.sum() + self.plain.sum()


def built(dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(4)
    model = Peculiar() if dtype is None else Peculiar().to(dtype)
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), "plain": model.plain}


def sharded(precision: str) -> dict[str, torch.Tensor]:
    with get_strategy("fsdp", precision=precision, unit_bytes=1) as strategy:
        strategy.seed_everything(4)
        with strategy.module_init_context():
            model = Peculiar()
        model = strategy.setup_module(model)
        found = {name: tensor.clone() for name, tensor in strategy.full_parameters(model)}
        return {**found, **dict(model.named_buffers()), "plain": model.plain}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("precision", "dtype"), [("32-true", None), ("bf16-true", torch.bfloat16)])
def test_values_are_those_of_a_plain_build(worlds: Any, size: int, precision: str, dtype: torch.dtype | None) -> None:
    truth = built(dtype)
    for found in worlds(size).run(sharded, precision):
        assert found.keys() == truth.keys()
        for name, tensor in truth.items():
            assert torch.equal(found[name], tensor), name


def eager_state() -> Any:
    """Build Adagrad, which makes its state at once, here from parameters that have no values yet."""
    with get_strategy("fsdp") as strategy:
        with strategy.module_init_context():
            model = models.make("uneven")
        optimizer = torch.optim.Adagrad(model.parameters(), initial_accumulator_value=0.25)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])
        return strategy.optimizer_state_dict(optimizer).get("state")


def test_optimizer_state_made_from_recorded_parameters_has_values(worlds: Any) -> None:
    state = worlds(2).run(eager_state)[0]
    assert state.keys() == dict(models.make("uneven").named_parameters()).keys()
    for slots in state.values():
        assert bool((slots["sum"] == 0.25).all())


def high_water(build_inside: bool) -> float:
    """Measure how much the process grew at most while a module of 192 MiB was built and sharded, in MiB."""

    def memory(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))

    with get_strategy("fsdp") as strategy:
        with strategy.module_init_context():
            warm_up = nn.Linear(4, 4)
        strategy.setup_module(warm_up)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # lets VmHWM start anew
        if build_inside:
            with strategy.module_init_context():
                model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(48)])
        else:
            model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(48)])
        strategy.setup_module(model)
        return memory("VmHWM") - before


def test_no_rank_ever_holds_the_whole_module(worlds: Any) -> None:
    assert min(worlds(2).run(high_water, False)) > 180, "built outside, the whole module is there"
    assert max(worlds(2).run(high_water, True)) < 96 + 4 + 40, "the shard, the largest tensor, and some slack"


def empty(path: Path | None) -> Any:
    with get_strategy("fsdp") as strategy:
        strategy.seed_everything(4 if path is None else 5)
        with strategy.module_init_context(empty_init=path is not None):
            model = Peculiar()
        model = strategy.setup_module(model)
        x = torch.ones(2, 6)
        if path is None:
            return strategy, model
        with pytest.raises(SetupError, match=r"built with empty_init=True and never filled, first 'gain'"):
            model(x)
        strategy.load_checkpoint(path, {"model": model})
        return model(x).item()


def save(path: Path) -> float:
    with get_strategy("fsdp") as strategy:
        strategy.seed_everything(4)
        with strategy.module_init_context():
            model = Peculiar()
        model = strategy.setup_module(model)
        strategy.save_checkpoint(path, {"model": model})
        return model(torch.ones(2, 6)).item()


def test_an_empty_build_must_be_filled_by_a_checkpoint(worlds: Any, tmp_path: Path) -> None:
    saved = worlds(2).run(save, tmp_path / "c")[0]
    assert worlds(2).run(empty, tmp_path / "c") == [saved, saved]


class Hoarder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.masks = [torch.ones(2), torch.zeros(2)]


def hoards() -> str:
    with get_strategy("fsdp") as strategy:
        with strategy.module_init_context():
            model = Hoarder()
        with pytest.raises(CannotReplay) as error:
            strategy.setup_module(model)
        return str(error.value)


def test_tensors_that_nobody_can_fill_are_refused(worlds: Any) -> None:
    assert all("Hoarder.masks keeps tensors in a list" in message for message in worlds(2).run(hoards))


def different_per_rank() -> torch.Tensor:
    with get_strategy("fsdp") as strategy:
        torch.manual_seed(strategy.global_rank)
        model = strategy.setup_module(nn.Linear(4, 4))
        return dict(strategy.full_parameters(model))["weight"].clone()


def test_values_made_outside_the_context_are_rank_zeros(worlds: Any) -> None:
    torch.manual_seed(0)
    truth = nn.Linear(4, 4).weight
    assert all(torch.equal(weight, truth) for weight in worlds(3).run(different_per_rank))
