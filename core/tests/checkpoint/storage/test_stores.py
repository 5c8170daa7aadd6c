"""Checkpoints in an object store, seen from one process."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import fsspec
import pytest
import torch
from fixtures.failing_store import FailingStore
from fixtures.single_rank import load, save, state_of
from fixtures.thread_ranks import all_ranks
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES
from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.policy import Retention, retain
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.storage.local import LocalFolder
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointNotFound, InvalidOption


@pytest.fixture
def store():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    return filesystem


def _module(value: float, width: int = 8) -> nn.Module:
    module = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def _is(module: nn.Module, value: float) -> bool:
    return all(bool((parameter == value).all()) for parameter in module.parameters())


def test_a_strategy_saves_finds_and_loads(store):
    kept = ShardedCheckpointIO(retention=Retention(keep_last=2))
    with get_strategy("single", accelerator="cpu", checkpoint_io=kept) as strategy:
        assert strategy.latest_checkpoint("memory://run") is None
        for step in (1, 2, 3):
            state = {"model": strategy.setup_module(_module(float(step))), "step": step}
            handle = strategy.save_checkpoint(f"memory://run/step-{step}", state)
            assert handle.wait() == f"memory://run/step-{step}"
        newest = strategy.latest_checkpoint("memory://run")
        assert newest == "memory://run/step-3"
        restored = {"model": strategy.setup_module(_module(-1)), "step": 0}
        assert strategy.load_checkpoint(newest, restored) == {}
    assert restored["step"] == 3
    assert _is(restored["model"], 3)
    assert {key.split("/")[2] for key in store.store} == {"step-2", "step-3"}


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_what_two_ranks_wrote_three_read(store, form):
    def state_on(coordinator, value, world_size):
        return TensorState({"model": _module(value)}, {}, rank=coordinator.rank, world_size=world_size)

    def save_on(coordinator):
        io, values = ShardedCheckpointIO(), {"copy": torch.arange(5)}
        for value in (1.0, 2.0):
            state = state_on(coordinator, value, 2)
            io.save("memory://c", state, values, coordinator=coordinator, information={}, state_dict_type=form)

    def load_on(coordinator):
        module = _module(-1)
        state = TensorState({"model": module}, {}, rank=coordinator.rank, world_size=3)
        loaded = ShardedCheckpointIO().load("memory://c", state, coordinator=coordinator)
        return _is(module, 2) and torch.equal(loaded.values["copy"], torch.arange(5))

    all_ranks(2, save_on)
    assert verify("memory://c").is_fine
    assert all_ranks(3, load_on) == [True] * 3
    names = sorted(key.removeprefix("/c/") for key in store.store)
    assert not [name for name in names if "part" in name or name.startswith("manifest.json-")]
    assert len(names) == (3 if form == "full" else 5)


def test_damage_is_named_before_anything_is_touched(store):
    save("memory://c", _module(1))
    (key,) = [key for key in store.store if "model" in key]
    whole = bytearray(store.cat_file(key))
    for place, problem in ((-3, "1 tensor is damaged: 'model.1.bias'"), (None, "were committed; it was cut short")):
        damaged = whole[:-4] if place is None else whole[:place] + b"\xff" + whole[place + 1 :]
        store.pipe_file(key, bytes(damaged))
        module = _module(-1)
        with pytest.raises(CheckpointCorrupted, match=problem):
            load("memory://c", module)
        assert _is(module, -1)
        assert not verify("memory://c").is_fine
    store.rm(key)
    with pytest.raises(CheckpointCorrupted, match="is not there any more"):
        load("memory://c", _module(-1))
    assert {damage.tensor for damage in verify("memory://c").damage} >= {"model.0.weight", "model.1.bias"}


def test_only_what_is_needed_is_fetched_and_nothing_twice():
    width = 1536  # 9.4 MB, so that a quarter of the rows is in one of three blocks
    run = "failing://run"
    FailingStore.fail_at(-1, "before")
    save(f"{run}/c", nn.Linear(width, width, bias=False))
    FailingStore.given.clear()

    class FirstQuarter(TensorState):
        def shards(self):
            (shard,) = super().shards()
            return [type(shard)(key=shard.key, shape=shard.shape, offsets=(0, 0), view=shard.view[: width // 4])]

    def load_on(coordinator):
        state = FirstQuarter({"model": nn.Linear(width, width, bias=False)}, {}, rank=0, world_size=1)
        ShardedCheckpointIO().load(f"{run}/c", state, coordinator=coordinator)

    all_ranks(1, load_on)
    asked = [(start, stop) for key, start, stop in FailingStore.given if "model" in key]
    assert len(asked) == 1
    assert asked[0][1] - asked[0][0] == BLOCK_BYTES
    FailingStore.given.clear()
    load(f"{run}/c", nn.Linear(width, width, bias=False))
    asked = sorted((start, stop) for key, start, stop in FailingStore.given if "model" in key)
    assert sum(stop - start for start, stop in asked) == width * width * 4
    assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(asked))


def _bytes_in_anonymous_files() -> int:
    total = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(each).endswith(" (deleted)"):
                total += each.stat().st_blocks * 512
        except FileNotFoundError:  # the folder's own descriptor
            continue
    return total


def test_an_export_holds_no_more_than_a_tensor_on_the_local_disk(store, tmp_path):
    from shard_core.checkpoint.interop.hf_export import export

    save("memory://c", nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))))
    before = _bytes_in_anonymous_files()
    held = []
    export("memory://c", tmp_path / "out", progress=lambda *_: held.append(_bytes_in_anonymous_files() - before))
    assert len(held) == 8
    assert max(held) < 2 << 20
    with pytest.raises(InvalidOption, match="is a URL, and an export goes to a disk"):
        export("memory://c", "memory://out")


def test_file_urls_are_folders(tmp_path):
    save(f"file://{tmp_path}/run/step-1", _module(1))
    assert open_folder(f"file://{tmp_path}/run") == LocalFolder(tmp_path / "run")
    assert latest(f"file://{tmp_path}/run") == tmp_path / "run" / "step-1"
    assert (tmp_path / "run" / "step-1" / "manifest.json").is_file()


def test_a_store_of_ones_own_is_used(store):
    module = _module(1)

    def save_on(coordinator):
        options = {"global_store": False}
        state = state_of(module)
        io = ShardedCheckpointIO()
        io.save("memory://c", state, {}, coordinator=coordinator, information={}, storage_options=options)
        return io.load("memory://c", state, coordinator=coordinator, storage_options=options)

    all_ranks(1, save_on)
    assert not store.store
    with pytest.raises(CheckpointNotFound, match="'memory://c' does not exist"):
        load("memory://c", module)


@pytest.mark.parametrize(
    ("path", "options", "error", "sentence"),
    [
        ("oss://bucket/run", None, CheckpointError, "needs a package that is not installed: pip install ossfs"),
        (
            "memori://run",
            None,
            InvalidOption,
            "of a kind that fsspec does not know; did you mean 'memory'",
        ),
        ("simplecache::memory://run", None, InvalidOption, "is a chain of URLs; give that of the store itself"),
        ("memory://run/../other", None, InvalidOption, r"holds '.', '..' or one of \*\?\[\] in its path"),
        ("memory://run/step-*", None, InvalidOption, "give a URL of plain names"),
        ("s3://", None, InvalidOption, "names no folder; give one, such as s3://bucket/run"),
        (Path("s3://bucket/run"), None, InvalidOption, "'s3:/bucket/run' was a URL before pathlib took a slash away"),
        ("run", {"key": "x"}, InvalidOption, "storage_options are for URLs of stores, and 'run' is on a disk"),
        ("file:///run", {"key": "x"}, InvalidOption, "and 'file:///run' is on a disk; leave them out"),
        ("s3://bucket/run", {"max_concurrency": 0}, InvalidOption, "the storage_options for .* cannot be used"),
    ],
)
def test_what_cannot_be_opened_gets_a_sentence(path, options, error, sentence):
    with pytest.raises(error, match=sentence):
        open_folder(path, options)


def test_objects_that_are_not_ours_stay_and_count_for_nothing(store):
    save("memory://run/step-1", _module(1))
    store.pipe_file("/run/step-1/notes.txt", b"mine")
    store.pipe_file("/run/step-1/deeper/model-00000-of-00001.safetensors", b"mine")
    store.pipe_file("/run/notes.txt", b"mine")
    save("memory://run/step-1", _module(2))
    save("memory://run/step-2", _module(3))
    with pytest.warns(UserWarning, match="an old checkpoint stays: 'memory://run/step-1' holds 'deeper'"):
        retain(open_folder("memory://run/step-2"), Retention(keep_last=1))
    assert store.cat_file("/run/step-1/notes.txt") == b"mine"
    assert verify("memory://run/step-1").is_fine
    assert latest("memory://run") == "memory://run/step-2"
