"""Saves to one path at one time: the earlier or the later checkpoint is whole, and whose was overtaken says so."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.s3_server import s3_server
from fixtures.scripts import environment
from fixtures.single_rank import load, save, state_of
from fixtures.thread_ranks import ThreadCoordinator, all_ranks
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.removal import remove_entry
from shard_core.checkpoint.retention.run_folder import run_entry
from shard_core.checkpoint.save.request import SaveRequest
from shard_core.checkpoint.save.save import ShardedSave
from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointError, CheckpointOvertaken

pytestmark = pytest.mark.slow

_PHASES = 3


def _module(value: float) -> nn.Module:
    module = nn.Linear(3, 2)
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def _value(path: Any) -> float:
    module = _module(-1)
    value: float = load(path, module).values["value"]
    assert all((parameter == value).all() for parameter in module.parameters())
    assert verify(path).is_fine
    return value


class _Save:
    """A save that is taken on a phase at a time."""

    def __init__(self, coordinator: ThreadCoordinator, path: Any, value: float, form: str) -> None:
        save = ShardedSave(SaveRequest(path=path, state_dict_type=form), None, coordinator)
        self.value = value
        self.began = self.ended = -1
        self.error: CheckpointError | None = None
        self._phases = iter(
            [
                save.begin_on_all_ranks,
                lambda: save.write(state_of(_module(value)), {"value": value}, {}),
                lambda: save.commit(None),
            ]
        )

    def go_on(self, turn: int) -> None:
        self.began = turn if self.began < 0 else self.began
        self.ended = turn
        if self.error is None:
            try:
                next(self._phases)()
            except CheckpointError as error:
                self.error = error


def _remove(path: Path) -> None:
    """Remove a checkpoint that another one is written beside; what is written meanwhile makes it look anew."""
    for _ in range(1000):
        entry = run_entry(LocalFolder(path))
        assert entry is not None
        with contextlib.suppress(CheckpointError):
            return remove_entry(entry, leftovers=False)
    raise AssertionError(f"{path} never stays as it is")


def _take_turns(coordinator: ThreadCoordinator, path: Any, order: tuple[int, ...], forms: tuple[str, str]) -> None:
    saves = [_Save(coordinator, path, float(number + 1), form) for number, form in enumerate(forms)]
    for turn, number in enumerate(order):
        saves[number].go_on(turn)
    first, second = sorted(saves, key=lambda one: one.ended)
    overtaken = second.began < first.ended
    assert first.error is None
    assert isinstance(second.error, CheckpointOvertaken) == overtaken == (second.error is not None), order
    assert _value(path) == (first if overtaken else second).value
    entry = run_entry(open_folder(path))
    assert entry is not None
    assert not entry.leftovers


@pytest.mark.parametrize("before", ["nothing", "a checkpoint"])
@pytest.mark.parametrize("store", ["disk", "memory"])
def test_two_saves_in_any_order_of_their_steps(tmp_path: Path, store: str, before: str) -> None:
    def on_rank(coordinator: ThreadCoordinator) -> None:
        for firsts in itertools.combinations(range(2 * _PHASES), _PHASES):
            order = tuple(0 if turn in firsts else 1 for turn in range(2 * _PHASES))
            MemoryFileSystem.store.clear()
            run = tmp_path / "".join(map(str, order)) if store == "disk" else "memory://run"
            path = f"{run}/step-1"
            if before == "a checkpoint":
                save(path, _module(0), values={"value": 0.0})
            forms = ("full", "sharded") if sum(firsts) % 3 == 0 else ("sharded", "sharded")
            _take_turns(coordinator, path, order, forms)

    all_ranks(1, on_rank)


def test_a_checkpoint_that_is_removed_while_it_is_replaced_leaves_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "step-1"

    def on_rank(coordinator: ThreadCoordinator) -> None:
        for removal in range(_PHASES + 1):
            save(path, _module(0), values={"value": 0.0})
            entry = run_entry(LocalFolder(path))
            assert entry is not None
            replacing = _Save(coordinator, path, 1.0, "sharded")
            for turn in range(_PHASES + 1):
                if turn == removal:
                    if turn < _PHASES:
                        _remove(path)
                    else:
                        with pytest.raises(CheckpointError, match="has changed since it was looked at"):
                            remove_entry(entry, leftovers=False)
                if turn < _PHASES:
                    replacing.go_on(turn)
            assert replacing.error is None
            assert _value(path) == 1.0

    all_ranks(1, on_rank)


def test_a_save_that_gives_up_leaves_the_files_of_the_other(tmp_path: Path) -> None:
    path = tmp_path / "step-1"

    def on_rank(coordinator: ThreadCoordinator) -> None:
        failing, other = (_Save(coordinator, path, value, "sharded") for value in (1.0, 2.0))
        failing.go_on(0)
        other.go_on(1)
        other.go_on(2)
        next(path.glob("index.safetensors")).unlink()  # the plain names are the failing one's
        (path / "model-00000-of-00001.safetensors").mkdir()
        failing.go_on(3)
        assert failing.error is not None
        (path / "model-00000-of-00001.safetensors").rmdir()
        other.go_on(4)
        assert other.error is None
        assert _value(path) == 2.0

    all_ranks(1, on_rank)


_HOLD = """
import os, signal, sys
from pathlib import Path
from shard_core.checkpoint.storage.locking import locked
with locked(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lock_whose_holder_was_killed_is_free(tmp_path: Path) -> None:
    path = tmp_path / "step-1"
    path.mkdir()
    done = subprocess.run([sys.executable, "-c", _HOLD, str(path / "save.lock")], check=False, timeout=60)
    assert done.returncode == -9
    assert (path / "save.lock").exists()
    save(path, _module(1), values={"value": 1.0})
    assert _value(path) == 1.0
    assert not (path / "save.lock").exists()


def _pairs(folder: str, pairs: int, kind: str, form: str, options: Any = None) -> None:
    """Overlap real runs of two ranks each, and check what is left each time."""
    script = Path(__file__).with_name("overlapping_saves.py")
    done = subprocess.run(
        [sys.executable, str(script), folder, str(pairs), kind, form, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=60 + 5 * pairs,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == pairs
    overtaken = 0
    for pair in found:
        errors = [error for error in pair["errors"] if error]
        assert "broken" not in pair, pair
        assert all(error.startswith("CheckpointOvertaken: ") for error in errors), errors
        assert len(errors) < 2
        assert not pair["leftovers"]
        assert pair["value"] in ([1.0, 2.0] if not errors else [1.0 + pair["errors"].index("")])
        overtaken += len(errors)
    assert overtaken > pairs / 4  # else they hardly overlapped, and nothing was seen


@pytest.mark.parametrize("kind", [pytest.param("existing", marks=pytest.mark.long), "new"])
def test_some_pairs_of_runs_that_overlap(tmp_path: Path, kind: str) -> None:
    _pairs(str(tmp_path), 8, kind, "sharded")


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("form", ["sharded", "full"])
@pytest.mark.parametrize("kind", ["existing", "new"])
def test_two_hundred_pairs_of_runs_that_overlap(tmp_path: Path, kind: str, form: str) -> None:
    _pairs(str(tmp_path), 200, kind, form)


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("kind", ["existing", "new"])
def test_two_hundred_pairs_of_runs_that_overlap_in_a_store(s3: dict[str, Any], kind: str) -> None:
    torch.set_num_threads(1)
    _pairs(f"s3://bucket/{kind}", 200, kind, "sharded", s3)
