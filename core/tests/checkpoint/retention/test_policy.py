from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings

import pytest
from fixtures.single_rank import state_of
from fixtures.small_checkpoint import forge
from fixtures.thread_ranks import all_ranks
from torch import nn

from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.policy import Retention, decide, retain
from shard_core.checkpoint.retention.removal import remove_entry
from shard_core.checkpoint.retention.run_folder import Standing, run_entries, run_entry
from shard_core.checkpoint.save import save as sharded_save
from shard_core.checkpoint.save.commit import Attempt
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.errors import CheckpointError, InvalidOption

DAY = 24 * 3600


def _save(path, step=None, io=None, **options):
    values = {} if step is None else {"step": step}

    def on_rank(coordinator):
        state = state_of(nn.Linear(2, 2))
        (io or ShardedCheckpointIO()).save(path, state, values, coordinator=coordinator, information={}, **options)

    all_ranks(1, on_rank)


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


def _removed(folder, **rule):
    decisions = decide(run_entries(folder), Retention(**rule))
    return [decision.entry.path.name for decision in decisions if decision.removes == "all"]


def _age(folder, seconds):
    then = time.time() - seconds
    for path in folder.iterdir():
        os.utime(path, (then, then))


def test_saves_leave_the_last_few_and_every_so_many_steps(tmp_path):
    io = ShardedCheckpointIO(retention=Retention(keep_last=2, keep_every=4))
    for step in range(1, 11):
        _save(tmp_path / f"step-{step}", step, io)
    assert _names(tmp_path) == ["step-10", "step-4", "step-8", "step-9"]
    assert all(verify(path).is_fine for path in tmp_path.iterdir())


def test_rank_0_alone_removes(tmp_path):
    io = ShardedCheckpointIO(retention=Retention(keep_last=1))

    def on_rank(coordinator):
        for step in (1, 2, 3):
            state = TensorState({"model": nn.Linear(2, 2)}, {}, rank=coordinator.rank, world_size=2)
            io.save(tmp_path / f"step-{step}", state, {"step": step}, coordinator=coordinator, information={})
            assert _names(tmp_path) == [f"step-{step}"]
            coordinator.barrier()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        all_ranks(2, on_rank)
    assert _names(tmp_path) == ["step-3"]


def test_what_counts_is_when_a_checkpoint_was_committed_and_the_one_just_written_stays(tmp_path):
    for step in (30, 20, 10):  # as after going back to an earlier step
        _save(tmp_path / f"step-{step}", step)
    assert _removed(tmp_path, keep_last=1) == ["step-30", "step-20"]
    retain(LocalFolder(tmp_path / "step-30"), Retention(keep_last=1))  # as if this host's clock went wrong
    assert _names(tmp_path) == ["step-10", "step-30"]


@pytest.fixture
def clock(monkeypatch):
    """A clock of rank 0 that can be set."""

    class Clock:
        hours = 0.0

        def time_ns(self):
            return int((1_800_000_000 + 3600 * self.hours) * 1e9)

    clock = Clock()
    monkeypatch.setattr(sharded_save, "time", clock)
    return clock


def test_a_clock_that_goes_back_hides_and_removes_no_newer_checkpoint(tmp_path, clock):
    io = ShardedCheckpointIO(retention=Retention(keep_last=2))
    for step in range(1, 7):
        clock.hours = -step
        _save(tmp_path / f"step-{step}", step, io)
        assert latest(tmp_path) == tmp_path / f"step-{step}"
    assert _names(tmp_path) == ["step-5", "step-6"]
    _save(tmp_path / "step-5", 5, io)  # as after going back to an earlier step
    assert latest(tmp_path) == tmp_path / "step-5"
    assert [entry.step for entry in run_entries(tmp_path)] == [6, 5]
    assert _removed(tmp_path, keep_last=1) == ["step-6"]


def test_a_clock_that_goes_back_hides_nothing_in_a_store(clock):
    for step in range(1, 4):
        clock.hours = -step
        _save(f"memory://clock/step-{step}", step)
    assert latest("memory://clock") == "memory://clock/step-3"


def test_checkpoints_older_than_the_sequence_are_ordered_by_when_they_were_committed_before_all_others(tmp_path, clock):
    for step, hours in ((1, 2), (2, 1), (3, 3)):
        clock.hours = hours
        _save(tmp_path / f"step-{step}", step)
        forge(tmp_path / f"step-{step}", lambda content: content.pop("sequence"))
    assert [entry.step for entry in run_entries(tmp_path)] == [2, 1, 3]
    assert latest(tmp_path) == tmp_path / "step-3"
    clock.hours = -5
    _save(tmp_path / "step-4", 4)
    assert latest(tmp_path) == tmp_path / "step-4"
    assert [entry.step for entry in run_entries(tmp_path)] == [2, 1, 3, 4]


def test_one_number_taken_twice_is_told_apart_by_the_step(tmp_path):
    for step in (10, 9):
        _save(tmp_path / f"step-{step}", step)
        forge(tmp_path / f"step-{step}", lambda content: content.update(sequence=7))
    assert latest(tmp_path) == tmp_path / "step-10"
    _save(tmp_path / "step-1", 1)
    assert latest(tmp_path) == tmp_path / "step-1"


def test_what_a_save_that_goes_on_has_written_stays_when_its_checkpoint_is_old(tmp_path):
    for step in (1, 2, 3):
        _save(tmp_path / f"step-{step}", step)
    going_on = Attempt.begin(LocalFolder(tmp_path / "step-1"), 1)
    written = going_on.single_file("index")
    retain(LocalFolder(tmp_path / "step-3"), Retention(keep_last=1))
    assert _names(tmp_path) == ["step-1", "step-3"]
    assert _names(tmp_path / "step-1") == [written]


def test_what_has_no_step_stays_under_keep_every_and_that_is_said(tmp_path):
    for name in ("a", "b", "c"):
        _save(tmp_path / name)
    with pytest.warns(UserWarning, match="keep_every=10 keeps every checkpoint in .* that has no step; put 'step'"):
        retain(LocalFolder(tmp_path / "c"), Retention(keep_last=1, keep_every=10))
    assert _names(tmp_path) == ["a", "b", "c"]
    retain(LocalFolder(tmp_path / "c"), Retention(keep_last=2))
    assert _names(tmp_path) == ["b", "c"]


def test_foreign_things_stay(tmp_path):
    for step in (1, 2, 3):
        _save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").symlink_to(tmp_path / "step-2", target_is_directory=True)
    before = _names(tmp_path / "step-1")
    with pytest.warns(UserWarning, match=r"stays: '.*step-1' holds 'notes.txt', which no save made"):
        retain(LocalFolder(tmp_path / "step-3"), Retention(keep_last=1))
    assert _names(tmp_path) == ["elsewhere", "step-1", "step-3"]
    assert _names(tmp_path / "step-1") == before


def test_others_weights_are_not_taken_for_a_save_that_died(tmp_path):
    sets = {
        "downloaded": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        "downloading": ["model-00001-of-00003.safetensors"],
        "merged": ["checkpoint.safetensors"],
        "page": ["manifest.json"],
    }
    for folder, names in sets.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_text("mine")
        _age(tmp_path / folder, 30 * DAY)
    assert run_entries(tmp_path) == []


@pytest.mark.parametrize("kind", ["fresh", "replacing"])
def test_leftovers_of_a_save_that_died_go_when_they_are_old(tmp_path, kind):
    path = tmp_path / "step-1"
    if kind == "replacing":
        _save(path, 1)
        (path / "model-00000-of-00001-0123456789ab.safetensors").write_bytes(b"cut sh")
        (path / "manifest.json-0123456789ab").write_bytes(b"{")
    else:
        path.mkdir()
        (path / "model-00000-of-00001.safetensors").write_bytes(b"cut sh")
    assert [each.removes for each in decide(run_entries(tmp_path), None)] == ["nothing"]
    _age(path, DAY + 1)
    (decision,) = decide(run_entries(tmp_path), None)
    assert decision.removes == {"fresh": "all", "replacing": "leftovers"}[kind]
    assert decision.bytes == {"fresh": 6, "replacing": 7}[kind]


def test_a_damaged_manifest_is_left_to_people_and_counts_for_nothing(tmp_path):
    for step in (1, 2, 3):
        _save(tmp_path / f"step-{step}", step)
    manifest = tmp_path / "step-3" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 3', b'"step": 9'))
    assert [each.standing for each in run_entries(tmp_path)][-1] is Standing.DAMAGED
    assert _removed(tmp_path, keep_last=1) == ["step-1"]


_KILLED_REMOVAL = """
import os, sys
from pathlib import Path
from shard_core.checkpoint.retention.removal import remove_entry
from shard_core.checkpoint.retention.run_folder import run_entry
from shard_core.checkpoint.storage.local import LocalFolder
left = int(sys.argv[2])
def die(event, arguments):
    global left
    if event in ("os.remove", "os.rmdir"):
        if left == 0:
            os._exit(9)
        left -= 1
entry = run_entry(LocalFolder(Path(sys.argv[1])))
sys.addaudithook(die)
remove_entry(entry)
"""


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_removal_that_is_killed_leaves_nothing_that_looks_whole_and_all_that_is_left_is_known(tmp_path, form):
    for operation in range(10):
        path = tmp_path / f"run-{operation}" / "step-1"
        _save(path, 1, state_dict_type=form)
        done = subprocess.run(
            [sys.executable, "-c", _KILLED_REMOVAL, str(path), str(operation)], check=False, timeout=60
        )
        if done.returncode == 0:
            assert not path.exists()
            break
        assert done.returncode == 9
        assert (latest(path.parent) == path) == (operation == 0)
        entry = run_entry(LocalFolder(path))
        if any(path.iterdir()):
            remove_entry(entry)
            assert not path.exists()
    assert 3 <= operation < 9


def test_what_changed_since_it_was_decided_stays(tmp_path):
    _save(tmp_path / "step-1", 1)
    entry = run_entry(LocalFolder(tmp_path / "step-1"))
    _save(tmp_path / "step-1", 1)
    with pytest.raises(CheckpointError, match="has changed since it was looked at; it stays"):
        remove_entry(entry)
    assert verify(tmp_path / "step-1").is_fine


_DISK_REFUSES = """
import sys, warnings
from pathlib import Path
from shard_core import get_strategy
from shard_core.checkpoint.retention.policy import Retention
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
run = Path(sys.argv[1])
def refuse(event, arguments):
    if event == "os.remove" and "step-1" in str(arguments[0]):
        raise OSError(5, "Input/output error")
with get_strategy("single", checkpoint_io=ShardedCheckpointIO(retention=Retention(keep_last=1))) as strategy:
    for step in (1, 2, 3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.save_checkpoint(run / f"step-{step}", {"step": step})
        if step == 1:
            sys.addaudithook(refuse)
        print(step, *(warning.message for warning in caught))
"""


def test_what_cannot_be_removed_is_a_warning_and_never_fails_the_save(tmp_path):
    program = [sys.executable, "-c", _DISK_REFUSES, str(tmp_path)]
    done = subprocess.run(program, check=True, timeout=120, capture_output=True, text=True)
    refused = f"an old checkpoint stays: '{tmp_path / 'step-1'}' cannot be removed: Input/output error."
    assert done.stdout.splitlines() == ["1", f"2 {refused}", f"3 {refused}"]
    assert _names(tmp_path) == ["step-1", "step-3"]
    assert all(verify(path).is_fine for path in tmp_path.iterdir())


@pytest.mark.parametrize("rule", [{"keep_last": 0}, {"keep_last": True}, {"keep_last": 2, "keep_every": 0}])
def test_rules_that_keep_nothing_are_refused(rule):
    with pytest.raises(InvalidOption, match="it must be a number from 1 up"):
        Retention(**rule)


def test_retention_must_be_one():
    with pytest.raises(InvalidOption, match="retention is 3; give a Retention"):
        ShardedCheckpointIO(retention=3)
