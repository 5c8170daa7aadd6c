"""What is shown of a program, and that looking on changes nothing of it."""

from __future__ import annotations

import os
import weakref

import pytest
import torch

from shard_core.testing.programs import observation
from shard_core.testing.programs.observation import _Rank
from shard_core.testing.programs.program import Segment


@pytest.fixture
def rank():
    rank = _Rank(-1)
    yield rank
    rank.teardown()


def test_a_module_is_asked_for_its_parameters_once(rank):
    strategy = rank.get_strategy("single", accelerator="cpu")
    module = strategy.setup_module(torch.nn.Linear(2, 2))
    rank.show(-1, **rank.state(strategy, [module], []))
    asked = []
    ask, module.parameters = module.parameters, lambda: asked.append(True) or ask()
    rank.show(0)
    module.weight.requires_grad_(False)
    rank.show(1)
    assert rank._before["trained"] == [False, True]
    assert not asked
    del module.parameters


def test_what_is_set_up_anew_is_looked_at_instead(rank):
    strategy = rank.get_strategy("single", accelerator="cpu")
    for number, frozen in enumerate((False, True), -1):
        module = strategy.setup_module(torch.nn.Linear(2, 2).requires_grad_(not frozen))
        rank.show(number, **rank.state(strategy, [module], []))
        assert rank._before["trained"] == [not frozen] * 2


@pytest.mark.parametrize("given", [True, False])
def test_a_strategy_may_hold_what_its_user_gave_it(monkeypatch, given):
    monkeypatch.setattr(observation, "_RELEASED_WITHIN", 0.0)
    rank, module = _Rank(-1), torch.nn.Linear(2, 2)
    monkeypatch.setattr(observation, "get_strategy", lambda _, **options: options)
    rank.get_strategy("fsdp", ignored_modules=[module] if given else (module,))
    rank._built.add(weakref.ref(module))
    monkeypatch.undo()
    del module
    assert rank.kept() == (() if given else ("Linear",))


def test_what_a_launcher_has_told_is_there_again_after_a_script_without_one(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    text = """
import os
from shard_core.testing.programs import unlaunched
def main(show, folder):
    unlaunched()
    os.environ["WORLD_SIZE"] = "3"  # as a launcher's would
    assert "RANK" not in os.environ
"""
    assert observation.run(text, "", Segment(-1, "ddp", 1)).stop is None
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
