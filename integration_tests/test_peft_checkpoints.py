"""Adapters alone are saved, loaded, exported and imported, while what they stand in stays where it is."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import adapters
import pytest
import torch
from environment_worlds import EnvironmentWorlds
from environments import python_with
from safetensors.torch import load_file
from strategy_chains import Station

from shard_core import get_strategy
from shard_core.checkpoint import export, inspect, verify

WEIGHTS = "adapter_model.safetensors"


def state_of(strategy: Any, model: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Copy all that a checkpoint must bring back."""
    weights = {key: tensor.clone() for key, tensor in strategy.module_state_dict(model).items()}
    slots = strategy.optimizer_state_dict(optimizer).get("state", {})
    moments = {
        f"{name}.{slot}": value.clone()
        for name, kept in slots.items()
        for slot, value in kept.items()
        if isinstance(value, torch.Tensor)
    }
    return strategy.broadcast((weights, moments))


def save(name: str, case: str, every: bool, folder: Path) -> Any:
    """Train, save the adapters alone in every way there is, and train on."""
    with get_strategy(name) as strategy:
        model, optimizer = adapters.set_up(strategy, case, "adamw", every)
        adapters.train(model, optimizer, strategy, case, steps=2)
        strategy.save_checkpoint(folder / "c", {"model": model, "optimizer": optimizer, "step": 2}, frozen=False)
        module: Any = strategy.unwrap(model)
        module.save_pretrained(folder / "peft")
        saved = state_of(strategy, model, optimizer)
        losses, norms = adapters.train(model, optimizer, strategy, case, steps=2, at=2)
        return saved, losses, norms


def resume(name: str, case: str, every: bool, path: Path) -> Any:
    """Load into a model whose adapters begin elsewhere, and train on."""
    with get_strategy(name) as strategy:
        model, optimizer = adapters.set_up(strategy, case, "adamw", every)
        adapters.train(model, optimizer, strategy, case, steps=1)
        state = {"model": model, "optimizer": optimizer, "step": 0}
        assert strategy.load_checkpoint(path, state) == {}
        assert state["step"] == 2
        loaded = state_of(strategy, model, optimizer)
        return loaded, *adapters.train(model, optimizer, strategy, case, steps=2, at=2)


@pytest.fixture
def on(worlds: Any) -> Iterator[Callable[..., list[Any]]]:
    """Return what runs a function on the ranks of a strategy, in the environment that has it."""
    with contextlib.ExitStack() as opened:

        def run(place: tuple[str, int], function: Callable[..., Any], *args: Any) -> list[Any]:
            station = Station(*place)
            python = python_with(station.strategy)
            if python == Path(sys.executable):
                return worlds(station.ranks).run(function, station.strategy, *args, timeout=180)
            elsewhere = opened.enter_context(contextlib.closing(EnvironmentWorlds(python)))
            world = elsewhere(station.ranks, station.environment)
            return world.run(function, station.strategy, *args, timeout=400)

        yield run


def plain(case: str, weights: dict[str, torch.Tensor]) -> Any:
    """Build the model in one process, with these weights."""
    torch.manual_seed(11)
    model = adapters.make(case)
    model.load_state_dict(weights, strict=False)
    return model


@pytest.mark.parametrize(
    ("first", "second", "case", "every"),
    [
        (("fsdp", 2), ("fsdp", 2), "injected", True),
        (("single", 1), ("fsdp", 3), "dora", True),
        (("fsdp", 2), ("deepspeed_stage_3", 2), "tied", True),
        (("deepspeed_stage_3", 2), ("ddp", 2), "tied", False),
        (("ddp", 2), ("tp", 2), "wrapped", True),
        (("tp", 2), ("deepspeed_stage_2", 2), "injected", True),
        pytest.param(("hsdp", 2), ("fsdp_cpu_offload", 3), "wrapped", False, marks=pytest.mark.long),
        pytest.param(("deepspeed_stage_1", 2), ("xla_fsdp", 2), "injected", True, marks=pytest.mark.long),
        pytest.param(("xla_fsdp", 2), ("xla_spmd", 2), "injected", False, marks=pytest.mark.long),
        pytest.param(("xla_spmd", 2), ("single", 1), "wrapped", True, marks=pytest.mark.long),
    ],
)
def test_adapters_alone_are_saved_and_resumed_elsewhere(
    on: Callable[..., list[Any]],
    tmp_path: Path,
    first: tuple[str, int],
    second: tuple[str, int],
    case: str,
    every: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    (weights, moments), losses, norms = on(first, save, case, every, tmp_path)[0]

    torch.manual_seed(11)
    trained = {key for key, each in adapters.make(case).named_parameters() if each.requires_grad}
    held = {
        each.key.removeprefix("model.") for each in inspect(tmp_path / "c").tensors if each.key.startswith("model.")
    }
    assert held == trained, "adapters, and nothing that is frozen"
    assert verify(tmp_path / "c").is_fine
    for loaded, their_losses, their_norms in on(second, resume, case, every, tmp_path / "c"):
        torch.testing.assert_close(loaded[0], weights, rtol=0, atol=0)
        torch.testing.assert_close(loaded[1], moments, rtol=0, atol=0)
        if first == second:
            assert (their_losses, their_norms) == (losses, norms)
        torch.testing.assert_close(their_losses, losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(their_norms, norms, rtol=1e-5, atol=1e-5)

    model = plain(case, weights)
    model.save_pretrained(tmp_path / "theirs")
    truth = load_file(tmp_path / "theirs" / WEIGHTS)
    torch.testing.assert_close(load_file(tmp_path / "peft" / WEIGHTS), truth, rtol=0, atol=0)
    export(tmp_path / "c", tmp_path / "out", config=tmp_path / "peft")
    exported = load_file(tmp_path / "out" / WEIGHTS)
    # PEFT writes the frozen weights of an embedding beside its adapters, and needs none to load them.
    torch.testing.assert_close(
        exported, {key: truth[key] for key in truth if ".wte.base_layer." not in key}, rtol=0, atol=0
    )
    configurations = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("out", "peft")]
    assert configurations[0] == configurations[1]
