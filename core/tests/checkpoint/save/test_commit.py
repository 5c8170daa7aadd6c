from __future__ import annotations

import json
import re
import zlib

import numpy as np
import pytest
import safetensors.numpy
import torch
from fixtures.single_rank import load, save, state_of
from fixtures.thread_ranks import all_ranks, on_ranks
from torch import nn

from shard_core.checkpoint.format.chunk_index import TensorRecord
from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.removal import remove_leftovers
from shard_core.checkpoint.retention.run_folder import run_entry
from shard_core.checkpoint.save.commit import Attempt
from shard_core.checkpoint.save.rank_index import decode_layout, decode_rank_index, encode_rank_index, index_of
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.storage.interface import FileRecord
from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.errors import CheckpointError, InvalidOption


def _module(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def _save_on_two(path, value):
    def save_on(coordinator):
        state = TensorState({"model": _module(value)}, {}, rank=coordinator.rank, world_size=2)
        ShardedCheckpointIO().save(path, state, {"value": value}, coordinator=coordinator, information={})

    return on_ranks(2, save_on)


def _value(path) -> float:
    module = _module(-1)
    values = load(path, module).values
    assert all((parameter == values["value"]).all() for parameter in module.parameters())
    return values["value"]


def test_replacing_keeps_the_folder_free_of_what_was(tmp_path):
    names = []
    for value in (1.0, 2.0, 3.0):
        assert _save_on_two(tmp_path / "c", value) == [None, None]
        assert _value(tmp_path / "c") == value
        assert verify(tmp_path / "c").is_fine
        names.append({path.name for path in (tmp_path / "c").iterdir()})
    assert names[0] == {
        "index.safetensors",
        "manifest.json",
        "model-00000-of-00002.safetensors",
        "model-00001-of-00002.safetensors",
    }
    assert names[0] & names[1] == names[1] & names[2] == {"manifest.json"}


def test_foreign_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "c").mkdir()
    for name in ("notes.txt", "model.safetensors", "model-1.safetensors"):
        (tmp_path / "c" / name).write_text("mine")
    save(tmp_path / "c", _module(1), values={"value": 1.0})
    save(tmp_path / "c", _module(2), values={"value": 2.0})
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "c" / "model.safetensors").read_text() == "mine"
    assert (tmp_path / "c" / "model-1.safetensors").read_text() == "mine"


def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing(tmp_path):
    name = "model-00001-of-00002.safetensors"
    (tmp_path / "c" / name).mkdir(parents=True)  # unlinking a folder fails
    for error in _save_on_two(tmp_path / "c", 2.0):
        assert isinstance(error, CheckpointError)
        assert str(error).startswith(f"saving '{tmp_path / 'c'}' failed on 1 of 2 ranks: rank 1: IsADirectoryError: ")
        assert name in str(error)
    (tmp_path / "c" / name).rmdir()
    assert list((tmp_path / "c").iterdir()) == []
    assert _save_on_two(tmp_path / "c", 3.0) == [None, None]
    assert _value(tmp_path / "c") == 3.0


def test_rank_0_failing_alone_fails_all(tmp_path):
    (tmp_path / "c").write_text("a file")
    for error in _save_on_two(tmp_path / "c", 1.0):
        assert "rank 0: " in str(error)
        assert "is a file" in str(error)
    assert (tmp_path / "c").read_text() == "a file"


def test_plain_names_that_are_taken_are_left_alone(tmp_path):
    (tmp_path / "c" / "index.safetensors").mkdir(parents=True)
    (tmp_path / "c" / "model-00001-of-00002.safetensors").mkdir()
    assert _save_on_two(tmp_path / "c", 2.0) == [None, None]
    assert _value(tmp_path / "c") == 2.0


def test_ranks_that_write_to_another_place_are_told_before_they_write(tmp_path):
    def save_on(coordinator):
        state = TensorState({"model": _module(1)}, {}, rank=coordinator.rank, world_size=2)
        gather = coordinator.gather_objects

        def gather_and_hide(value):
            answer = gather(value)
            for sign in (tmp_path / "c").glob("index*") if coordinator.rank == 1 else ():
                sign.unlink()  # rank 0 has written it, and not on this rank's disk
            return answer

        coordinator.gather_objects = gather_and_hide
        ShardedCheckpointIO().save(tmp_path / "c", state, {}, coordinator=coordinator, information={})

    for error in on_ranks(2, save_on):
        assert "failed on 1 of 2 ranks: rank 1: this rank does not see what rank 0 writes into" in str(error)
        assert str(error).endswith("that the hosts of all ranks share, or a URL such as s3://bucket/run.")
    assert not (tmp_path / "c").exists()


def test_parts_that_rank_0_does_not_see_are_named(tmp_path):
    def save_on(coordinator):
        state = TensorState({"model": _module(1)}, {}, rank=coordinator.rank, world_size=2)
        gather = coordinator.gather_objects

        def gather_and_lose(value):
            for part in (tmp_path / "c").glob("part-00001-*") if coordinator.rank == 1 else ():
                part.unlink()  # it is written, and not on rank 0's disk
            return gather(value)

        coordinator.gather_objects = gather_and_lose
        ShardedCheckpointIO().save(tmp_path / "c", state, {}, coordinator=coordinator, information={})

    for error in on_ranks(2, save_on):
        assert "rank 0 does not see what rank 1 wrote into" in str(error)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("shapes", "sentence"),
    [
        (
            [(8, 8), (8, 9)],
            r"rank 1 holds 'model.weight' as F32 of shape \(8, 9\), another rank as F32 of shape \(8, 8\)",
        ),
    ],
)
def test_ranks_that_hold_different_models_are_told(tmp_path, shapes, sentence):
    def save_on(coordinator):
        module = nn.Linear(*reversed(shapes[coordinator.rank]), bias=False)
        module.weight = nn.Parameter(torch.zeros(shapes[coordinator.rank]))
        state = TensorState({"model": module}, {}, rank=coordinator.rank, world_size=2)
        ShardedCheckpointIO().save(tmp_path / "c", state, {}, coordinator=coordinator, information={})

    for error in on_ranks(2, save_on):
        with pytest.raises(CheckpointError, match=sentence):
            raise error


def test_boxes_that_do_not_tile_are_never_committed(tmp_path):
    def save_on(coordinator):
        # Both think they are alone, so that both write everything.
        ShardedCheckpointIO().save(tmp_path / "c", state_of(_module(1)), {}, coordinator=coordinator, information={})

    for error in on_ranks(2, save_on):
        assert "'model.0.bias' of shape (8,) is not covered exactly once: boxes hold 16 of its 8 elements" in str(error)
    assert not (tmp_path / "c").exists()


def test_leftovers_of_an_attempt_that_died_are_never_taken_for_this_ones_nor_removed(tmp_path):
    dead = Attempt.begin(LocalFolder(tmp_path / "c"), 2)
    names = {dead.rank_index_file(1), dead.tensor_file("model", 1), dead.tensor_file("optim", 0)}
    for name in names:
        (tmp_path / "c" / name).write_bytes(b"stale")
    assert latest(tmp_path) is None
    assert _save_on_two(tmp_path / "c", 1.0) == [None, None]
    assert _value(tmp_path / "c") == 1.0
    entry = run_entry(LocalFolder(tmp_path / "c"))
    assert set(entry.leftovers) == names | {"index.safetensors"}  # it may not be dead: nobody can tell
    remove_leftovers(entry)
    assert _value(tmp_path / "c") == 1.0


def test_latest_is_the_newest_committed_one(tmp_path):
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    for step in (2, 10, 1):
        save(tmp_path / f"step-{step}", _module(step), values={"value": float(step)})
    Attempt.begin(LocalFolder(tmp_path / "step-11"), 1)
    assert latest(tmp_path) == tmp_path / "step-1"
    save(tmp_path / "step-2", _module(3), values={"value": 3.0})
    assert latest(tmp_path) == tmp_path / "step-2"
    (tmp_path / "step-2" / "manifest.json").write_text("{}")
    with pytest.warns(UserWarning, match="passing over the checkpoint"):
        assert latest(tmp_path) == tmp_path / "step-1"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"storage_options": {"key": "x"}}, "storage_options are for URLs of stores, and '.*' is on a disk"),
        ({"state_dict_type": "ful"}, "none of: sharded, full; did you mean 'full'"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, sentence):
    with pytest.raises(InvalidOption, match=sentence):
        save(tmp_path / "c", nn.Linear(1, 1), **options)


def test_a_finished_save_says_where_it_is(tmp_path):
    def save_on(coordinator):
        return ShardedCheckpointIO().save(
            tmp_path / "c", state_of(_module(1)), {}, coordinator=coordinator, information={"strategy": "single"}
        )

    (handle,) = all_ranks(1, save_on)
    assert handle.wait() == tmp_path / "c"
    assert handle.staged.done()
    assert handle.committed.done()


_FILE = {"path": "model-00000-of-00001.safetensors", "bytes": 64, "digest": "0123456789abcdef"}


@pytest.mark.parametrize(
    ("about", "sentence"),
    [
        ("[]", "a rank index must be a JSON object"),
        ("{", "no JSON that can be read"),
        ("{}", "a rank index lacks 'attempt'"),
        ("[" * 100_000, "no JSON that can be read"),
        ({"attempt": "ba9876543210"}, "a rank index belongs to save ba9876543210, not to 0123456789ab"),
        ({"attempt": 3}, "'attempt' of a rank index must be a string"),
        ({"files": [{**_FILE, "path": "../../model-00000-of-00001.safetensors"}]}, "'path' of an item in 'files'"),
        ({"files": [{**_FILE, "bytes": 1.5}]}, "'bytes' of an item in 'files'"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_part_records_that_no_rank_writes_are_refused(about, sentence):
    text = about if isinstance(about, str) else json.dumps({**_ABOUT, **about})
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        decode_rank_index(_part_record(text), _ABOUT["attempt"])


_ABOUT = {"attempt": "0123456789ab", "files": []}


def _part_record(text: str) -> bytes:
    columns = safetensors.numpy.load(encode_rank_index("0123456789ab", index_of([], [], {})))
    return safetensors.numpy.save({**columns, "about": np.frombuffer(text.encode(), dtype=np.uint8)})


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        (b"", "no JSON that can be read"),
        (b'{"tensors": [{}]}', "'tensors' of the layout of a rank index must be an object"),
        (b'{"tensors": {"model.w": ["F32", -1]}}', "'model.w' is described as no tensor can be"),
    ],
)
def test_tensors_in_part_records_are_believed_no_more(tensors, sentence):
    columns = safetensors.numpy.load(zlib.decompress(_layout()))
    raw = safetensors.numpy.save({**columns, "tensors": np.frombuffer(tensors, dtype=np.uint8)})
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        decode_layout(zlib.compress(raw))


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        (b"", "cannot be unpacked"),
        (zlib.compress(b"{}")[:-1], "cannot be unpacked"),
        (zlib.compress(b"{}"), "no safetensors file"),
        (zlib.compress(safetensors.numpy.save({"cut": np.zeros(1)})), "does not have the columns"),
    ],
)
def test_layouts_that_no_rank_writes_are_refused(raw, sentence):
    with pytest.raises(CheckpointError, match=re.escape(sentence)):
        decode_layout(raw)


def _layout() -> bytes:
    return decode_rank_index(encode_rank_index("0123456789ab", index_of([], [], {})), "0123456789ab").layout


def test_part_records_that_are_not_what_their_rank_wrote_are_named(tmp_path):
    def save_on(coordinator):
        state = TensorState({"model": _module(1)}, {}, rank=coordinator.rank, world_size=2)
        gather = coordinator.gather_objects

        def gather_and_damage(value):
            for part in (tmp_path / "c").glob("part-00001-*") if coordinator.rank == 1 else ():
                part.write_bytes(part.read_bytes()[:-8] + b"\xff" * 8)
                coordinator.gather_objects = gather  # once: rank 0 reads it now, and removes it
            return gather(value)

        coordinator.gather_objects = gather_and_damage
        ShardedCheckpointIO().save(tmp_path / "c", state, {}, coordinator=coordinator, information={})

    for error in on_ranks(2, save_on):
        assert "rank 0 does not see what rank 1 wrote into" in str(error)
    assert not (tmp_path / "c").exists()


def test_part_records_come_back(tmp_path):
    tensors = [
        TensorRecord(key="model.w", dtype="F32", shape=(2, 3)),
        TensorRecord(key="model.x", dtype="U8", shape=()),
    ]
    index = index_of(tensors, [FileRecord(**_FILE)], {})
    found = decode_rank_index(encode_rank_index("0123456789ab", index), "0123456789ab")
    assert (decode_layout(found.layout).tensors, tuple(found.files)) == (index.tensors, index.files)
