"""Checkpoints that change while they are read: a load brings one save as a whole, or leaves everything as it was."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.scripts import environment
from fixtures.single_rank import load, save
from fixtures.thread_ranks import on_ranks
from torch import nn

from shard_core.checkpoint.load.load import ShardedLoad
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointCorrupted, CheckpointError

_WIDTH = 256


def _module(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


_WRITER = """
import sys
from fixtures.single_rank import save
from test_replaced_while_read import _module
value = 1.0
while True:
    save(sys.argv[1], _module(value), values={"value": value}, state_dict_type=["sharded", "full"][int(value) % 2])
    value += 1
"""


def _loads(path: Path, count: int) -> list[str]:
    """Load on two ranks again and again; return what went wrong."""
    wrong: list[str] = []
    for _ in range(count):
        modules = [_module(-1), _module(-1)]

        def load_on(coordinator: Any, modules: list[nn.Module] = modules) -> Any:
            state = TensorState({"model": modules[coordinator.rank]}, {}, rank=coordinator.rank, world_size=2)
            return ShardedCheckpointIO().load(path, state, coordinator=coordinator).values["value"]

        answers = on_ranks(2, load_on)
        for module, answer in zip(modules, answers, strict=True):
            wanted = -1.0 if isinstance(answer, Exception) else answers[0]
            assert all((parameter == wanted).all() for parameter in module.parameters())
        wrong += [str(answer) for answer in answers[:1] if isinstance(answer, Exception)]
    return wrong


def _read_beside_a_writer(path: Path, count: int) -> list[str]:
    save(path, _module(0), values={"value": 0.0})
    program = [sys.executable, "-c", _WRITER, str(path)]
    writer = subprocess.Popen(program, env=environment())
    try:
        while load(path, _module(-1)).values["value"] < 2:
            assert writer.poll() is None
        return _loads(path, count)
    finally:
        writer.kill()
        writer.wait()


def test_a_checkpoint_that_is_replaced_again_and_again_is_read(tmp_path: Path) -> None:
    assert _read_beside_a_writer(tmp_path / "c", 60) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_checkpoint_that_is_replaced_again_and_again_is_always_read(tmp_path: Path) -> None:
    assert _read_beside_a_writer(tmp_path / "c", 1000) == []


@pytest.mark.parametrize("store", ["disk", "memory"])
@pytest.mark.parametrize("phase", ["prepare", "verify", "fill"])
def test_a_checkpoint_that_is_replaced_before_a_phase_of_the_load_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str, phase: str
) -> None:
    path = str(tmp_path / "c") if store == "disk" else f"memory://{tmp_path.name}/{phase}"
    save(path, _module(1), values={"value": 1.0})
    left = itertools.chain([2.0], itertools.repeat(None))
    then = getattr(ShardedLoad, phase)

    def replace(load: ShardedLoad, *arguments: Any) -> Any:
        value = next(left)
        if value is not None:
            save(path, _module(value), values={"value": value})
        return then(load, *arguments)

    monkeypatch.setattr(ShardedLoad, phase, replace)
    module = _module(-1)
    value = load(path, module).values["value"]
    assert value == (1.0 if phase == "fill" else 2.0)
    assert all((parameter == value).all() for parameter in module.parameters())


def test_one_that_is_always_replaced_is_given_up_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    save(path, _module(0), values={"value": 0.0})
    verify = ShardedLoad.verify

    def replace(load: ShardedLoad) -> None:
        save(path, _module(1), values={"value": 1.0})
        verify(load)

    monkeypatch.setattr(ShardedLoad, "verify", replace)
    module = _module(-1)
    with pytest.raises(CheckpointError, match="was replaced 20 times while it was read; load it when nobody saves"):
        load(path, module)
    assert all((parameter == -1).all() for parameter in module.parameters())


def test_damage_stays_damage(tmp_path: Path) -> None:
    path = tmp_path / "c"
    save(path, _module(1))
    (path / "model-00000-of-00001.safetensors").unlink()
    with pytest.raises(CheckpointCorrupted, match="cannot be opened as a file of a checkpoint"):
        load(path, _module(-1))


@pytest.mark.parametrize("change", ["cut short", "written to"])
@pytest.mark.parametrize("when", ["before verify", "after verify", "in fill"])
def test_a_file_that_changes_under_a_load_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, change: str
) -> None:
    path = tmp_path / "c"
    save(path, _module(1))
    file = path / "model-00000-of-00001.safetensors"
    fill, verify, finish = ShardedLoad.fill, ShardedLoad.verify, TensorState.check_load

    def do() -> None:
        if change == "cut short":
            os.truncate(file, 4096)
        else:
            with file.open("r+b") as opened:
                opened.seek(-4, os.SEEK_END)
                opened.write(b"\0\0\0\0")

    def hook(then: Any, first: bool = True) -> Any:
        def call(*arguments: Any) -> Any:
            do()
            return then(*arguments)

        return call

    if when == "before verify":
        monkeypatch.setattr(ShardedLoad, "verify", hook(verify))
    elif when == "after verify":
        monkeypatch.setattr(TensorState, "check_load", hook(finish))
    else:
        monkeypatch.setattr(ShardedLoad, "fill", hook(fill))
    module = _module(-1)
    with pytest.raises(CheckpointCorrupted) as caught:
        load(path, module)
    filled = "A part of it is loaded by now" in str(caught.value)
    assert filled == (when == "in fill")
    if not filled:
        assert all((parameter == -1).all() for parameter in module.parameters())


_TRUNCATED = """
import os, sys, threading, time, random
import torch
from torch import nn
from fixtures.single_rank import load, save
from shard_core.errors import CheckpointError
module = nn.Linear(2048, 2048)
told = 0
for turn in range(8):
    path = f"{sys.argv[1]}/{turn}"
    save(path, module)
    file = f"{path}/model-00000-of-00001.safetensors"
    cut = threading.Timer(random.Random(turn).uniform(0, 0.01), os.truncate, [file, 0])
    cut.start()
    try:
        load(path, module)
    except CheckpointError as error:
        told += 1
    cut.join()
print(told)
"""


def test_a_file_that_is_cut_short_at_any_time_never_kills_the_process(tmp_path: Path) -> None:
    program = [sys.executable, "-c", _TRUNCATED, str(tmp_path)]
    done = subprocess.run(program, check=False, timeout=120, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    assert 0 <= int(done.stdout) <= 8


class _Refusing:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise ValueError("not mine")


def test_an_object_that_refuses_its_state_leaves_the_tensors_alone(tmp_path: Path) -> None:
    from shard_core import get_strategy

    strategy = get_strategy("single", accelerator="cpu")
    model = strategy.setup_module(_module(1))
    strategy.save_checkpoint(tmp_path / "c", {"model": model, "mine": _Refusing(), "step": 3})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(-1)
    state = {"model": model, "mine": _Refusing(), "step": 0}
    with pytest.raises(CheckpointError, match="ValueError: not mine"):
        strategy.load_checkpoint(tmp_path / "c", state)
    assert state["step"] == 0
    assert all((parameter == -1).all() for parameter in model.parameters())
