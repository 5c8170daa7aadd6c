"""Averages are refused where they would be wrong; what they are is tested where weights are sharded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import ExponentialMovingAverage, get_strategy
from shard_core.backend import FlatPart, ModuleTensors
from shard_core.errors import InvalidOption, MissingCapability


@pytest.mark.parametrize("decay", [-0.1, 1.5, "0.9", True, None])
def test_a_decay_is_between_0_and_1(decay: Any) -> None:
    with get_strategy("single") as strategy:
        model = strategy.setup_module(nn.Linear(1, 1))
        with pytest.raises(InvalidOption, match=r"decay is .*; give a number from 0 to 1"):
            ExponentialMovingAverage(strategy, model, decay)


def test_an_engine_with_a_form_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with get_strategy("single") as strategy:
        monkeypatch.setattr(strategy, "engine_keeps_torch_tensors", False)
        with pytest.raises(MissingCapability, match="strategy 'single' keeps parameters in a form of its own"):
            ExponentialMovingAverage(strategy, strategy.setup_module(nn.Linear(1, 1)))


def test_parts_of_flat_parameters_are_averaged_written_and_published(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.ModuleDict({"parts": nn.Linear(2, 2, bias=False)})  # a name that the kept module could have used itself
    weight = model["parts"].weight
    part = FlatPart(shape=(2, 2), start=1, values=torch.tensor([1.0, 2.0]))
    published = []
    with get_strategy("single") as strategy:
        monkeypatch.setattr(strategy, "engine_keeps_torch_tensors", False)
        monkeypatch.setattr(strategy, "engine_flat_parts", lambda _: {weight: part})
        monkeypatch.setattr(strategy, "engine_publish_parts", lambda _: published.append(part.values.tolist()))
        average = ExponentialMovingAverage(strategy, strategy.setup_module(model), 0.5)
        part.values.add_(2)
        average.update()
        with pytest.raises(KeyError), average.applied():
            raise KeyError
        assert published == [[2.0, 3.0], [3.0, 4.0]]
        tensors = ModuleTensors("average", average.kept_module)
        assert tensors.shape_of("parts.weight") == (2, 2)
        assert tensors.parts["parts.weight"].start == 1
        assert tensors.parts["parts.weight"].values.tolist() == [2.0, 3.0]


def test_updates_wait_until_an_async_save_has_copied_the_average(tmp_path: Path) -> None:
    with get_strategy("single") as strategy:
        model = strategy.setup_module(nn.Linear(1000, 1000))
        average = ExponentialMovingAverage(strategy, model, 0.5)
        for step in range(5):
            with torch.no_grad():
                model.weight.fill_(step)
            state = {"average": average, "model": model}
            handle = strategy.save_checkpoint(tmp_path / str(step), state, blocking=False)
            average.update()
            with average.applied():
                pass
            handle.wait()  # would raise that one of them had changed


def test_tied_weights_are_averaged_once_and_buffers_follow() -> None:
    with get_strategy("single") as strategy:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        model[2].weight = model[0].weight
        model = strategy.setup_module(model)
        average = ExponentialMovingAverage(strategy, model, 0.5)
        nn.init.constant_(model[1].running_mean, 3.0)
        average.update()
        kept = average.kept_module.state_dict()
        assert kept.keys() == model.state_dict().keys()
        assert kept["0.weight"].data_ptr() == kept["2.weight"].data_ptr() != model[0].weight.data_ptr()
        assert kept["1.running_mean"].tolist() == [3.0, 3.0]


def test_complex_parameters_are_averaged() -> None:
    with get_strategy("single") as strategy:
        model = nn.Module()
        model.register_parameter("turned", nn.Parameter(torch.full((2,), 1 + 2j)))
        model = strategy.setup_module(model)
        average = ExponentialMovingAverage(strategy, model, 0.75)
        with torch.no_grad():
            model.turned.add_(4 - 4j)
        average.update()
        assert average.kept_module.state_dict()["turned"].tolist() == [2 + 1j] * 2
