"""LoRA models of PEFT train under every strategy as in plain PyTorch, from the values of a plain build."""

from contextlib import closing
from typing import Any

import adapters
import pytest
import torch
from environment_worlds import EnvironmentWorlds
from environments import python_with
from strategy_chains import Station

from shard_core import get_strategy
from shard_core.testing.oracle import assert_same_numbers, assert_same_weights

#: Which adapters, which optimizer, and whether it is given what is frozen too.
CASES = [("wrapped", "adamw", False), ("injected", "sgd", False), ("bf16", "sgd", True)]
TIED = ("tied", "adamw", True)
WORLDS = {
    "single": (1, [*CASES, TIED]),
    "ddp": (2, [*CASES, TIED]),
    "fsdp": (2, [*CASES, TIED]),
    "fsdp_cpu_offload": (2, [*CASES, TIED]),
    "hsdp": (2, [*CASES, TIED]),
    "deepspeed_stage_1": (2, [*CASES, TIED]),
    "deepspeed_stage_2": (2, [*CASES, TIED]),
    "deepspeed_stage_3": (2, [*CASES, TIED]),
    "tp": (2, CASES),  # GPT-2 in transformers has no plan
}
OFTEN = ("single", "fsdp", "deepspeed_stage_3", "tp")
"""Of these, what is asked in every run: one of each engine."""


def run(name: str, cases: list[tuple[str, str, bool]]) -> Any:
    answers = []
    for case, optimizer, every in cases:
        with get_strategy(name) as strategy:
            model, made = adapters.set_up(strategy, case, optimizer, every)
            start = {key: tensor.clone() for key, tensor in strategy.full_parameters(model)}
            losses, norms = adapters.train(model, made, strategy, case)
            end = {key: tensor.clone() for key, tensor in strategy.full_parameters(model)}
            answers.append((losses, norms, start, end))
    return answers


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.long) for name in WORLDS]
)
def test_adapters_train_as_in_plain_pytorch(worlds: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    size, cases = WORLDS[name]
    assert_trained_as_in_plain_pytorch(worlds(size).run(run, name, cases, timeout=180), cases)


@pytest.mark.long
@pytest.mark.parametrize("station", [Station("xla_fsdp", 2), Station("xla_spmd", 2)], ids=str)
def test_adapters_train_as_in_plain_pytorch_on_xla(station: Station) -> None:
    cases = [CASES[0], CASES[1], ("tied", "sgd", True)]
    with closing(EnvironmentWorlds(python_with(station.strategy))) as worlds:
        world = worlds(station.ranks, station.environment)
        assert_trained_as_in_plain_pytorch(world.run(run, station.strategy, cases, timeout=500), cases)


def assert_trained_as_in_plain_pytorch(ranks: list[Any], cases: list[tuple[str, str, bool]]) -> None:
    for answers in ranks:
        for (case, optimizer, every), (losses, norms, start, end) in zip(cases, answers, strict=True):
            torch.manual_seed(11)
            begun = dict(adapters.make(case).state_dict())
            model, true_losses, true_norms = adapters.plain(case, optimizer, every)
            truth = {key: each for key, each in model.named_parameters() if each.requires_grad}
            rough = 1e-2 if case == "bf16" else 1e-5
            assert_same_numbers(f"{case}: losses", losses, true_losses, rough)
            assert_same_numbers(f"{case}: norms", norms, true_norms, rough)
            for key, tensor in start.items():
                assert torch.equal(tensor, begun[key]), f"{key} does not begin as in a plain build"
            assert_same_weights({key: end[key] for key in truth}, truth, rough)
            for key in end.keys() - truth.keys():
                assert torch.equal(end[key], begun[key]), f"{key} is frozen and has changed"
