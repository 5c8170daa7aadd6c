"""Checkpoints in S3, spoken to a real server by real ranks."""

from __future__ import annotations

import functools
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures import foreign_weights
from fixtures.s3_server import s3_server
from fixtures.scripts import environment
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.format.folder import latest
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.policy import Retention
from shard_core.checkpoint.retention.run_folder import run_entries
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointNotFound, StorageError

WIDTH = 1536  # 9.4 MB a layer, which is several blocks


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


def _module(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))


def save(url: str, options: dict[str, Any] | None, seeds: list[int], form: str, retention: Retention | None) -> Any:
    """Save once per seed under ``ddp``, whose ranks write in turn; return what is the newest, or what went wrong."""
    kept = ShardedCheckpointIO(retention=retention)
    with get_strategy("ddp", accelerator="cpu", checkpoint_io=kept) as strategy:
        for place, seed in enumerate(seeds):
            module = strategy.setup_module(_module(seed))
            state = {"model": module, "step": seed, "copy": torch.full((3,), seed)}
            try:
                strategy.save_checkpoint(url.format(place=place), state, storage_options=options, state_dict_type=form)
            except CheckpointError as error:
                return str(error)
        return strategy.latest_checkpoint(url.rpartition("/")[0], storage_options=options)


def load(url: str, options: dict[str, Any], seed: int) -> tuple[bool, int]:
    """Load under ``ddp``; return whether all is as it was saved, and the step."""
    with get_strategy("ddp", accelerator="cpu") as strategy:
        module = strategy.setup_module(_module(-1))
        state = {"model": module, "step": 0}
        rest = strategy.load_checkpoint(url, state, storage_options=options)
        same = _same(strategy.unwrap(module), _module(seed)) and torch.equal(rest["copy"], torch.full((3,), seed))
        return same, state["step"]


def load_weights(url: str, options: dict[str, Any], seed: int) -> bool:
    """Load what another library wrote under ``ddp``; return whether all is as it was written."""
    with get_strategy("ddp", accelerator="cpu") as strategy:
        module = strategy.setup_module(_module(-1))
        assert strategy.load_weights(url, module, storage_options=options) == ()
        return _same(strategy.unwrap(module), _module(seed))


def _same(module: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def _load_alone(url: str, options: dict[str, Any]) -> nn.Module:
    with get_strategy("single", accelerator="cpu") as strategy:
        module = strategy.setup_module(_module(-1))
        strategy.load_checkpoint(url, {"model": module}, storage_options=options)
        return strategy.unwrap(module)


def _names(url: str, options: dict[str, Any]) -> list[str]:
    import s3fs

    store = s3fs.S3FileSystem(**options, use_listings_cache=False)
    return sorted(path.rpartition("/")[2] for path in store.find(url))


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_two_ranks_save_over_what_is_there_and_any_number_loads(worlds: Any, s3: dict[str, Any], form: str) -> None:
    url = f"s3://bucket/{form}/step-1"
    assert worlds(2).run(save, url, s3, [1, 2], form, None) == [url, url]
    assert verify(url, storage_options=s3).is_fine
    assert _same(_load_alone(url, s3), _module(2))
    if form == "sharded":
        assert worlds(2).run(load, url, s3, 2) == [(True, 2)] * 2
    names = _names(url, s3)
    assert len(names) == (3 if form == "full" else 5)
    assert not [name for name in names if name.startswith(("part-", "manifest.json-"))]


def test_a_run_keeps_its_last_checkpoints(worlds: Any, s3: dict[str, Any]) -> None:
    found = worlds(2).run(save, "s3://bucket/kept/{place}", s3, [1, 2, 3], "sharded", Retention(keep_last=2))
    assert found == ["s3://bucket/kept/2"] * 2
    entries = run_entries("s3://bucket/kept", storage_options=s3)
    assert [(entry.path, entry.step) for entry in entries] == [("s3://bucket/kept/1", 2), ("s3://bucket/kept/2", 3)]
    assert not any(entry.leftovers or entry.unknown for entry in entries)


def test_damage_is_named(worlds: Any, s3: dict[str, Any]) -> None:
    import s3fs

    url = "s3://bucket/damaged/step-1"
    worlds(2).run(save, url, s3, [1], "sharded", None)
    store = s3fs.S3FileSystem(**s3)
    path = next(path for path in store.find(url) if "model-00000" in path)
    whole = bytearray(store.cat_file(path))
    whole[-5] ^= 1
    store.pipe_file(path, bytes(whole))
    with pytest.raises(CheckpointCorrupted, match=r"1 tensor is damaged: 'model\."):
        _load_alone(url, s3)
    (damage,) = verify(url, storage_options=s3).damage
    assert damage.file == path.rpartition("/")[2]
    store.pipe_file(f"{url}/manifest.json", b"{}")
    with pytest.warns(UserWarning, match="passing over the checkpoint"):
        assert latest("s3://bucket/damaged", storage_options=s3) is None


_WEIGHTS = {
    "safetensors file": (foreign_weights.write_file, "weights.safetensors"),
    "Hugging Face folder": (functools.partial(foreign_weights.write_folder, files=3), "folder"),
    "torch file": (foreign_weights.write_torch, "weights.bin"),
    "distributed folder": (foreign_weights.write_distributed, "distributed"),
}


@pytest.mark.parametrize(("write", "name"), _WEIGHTS.values(), ids=_WEIGHTS.keys())
def test_two_ranks_load_weights_that_other_libraries_wrote(
    worlds: Any, s3: dict[str, Any], tmp_path: Path, write: Callable[..., Path], name: str
) -> None:
    import s3fs

    written = write(tmp_path / name, _module(1).state_dict())
    s3fs.S3FileSystem(**s3).put(str(written), f"bucket/weights/{name}", recursive=written.is_dir())
    assert worlds(2).run(load_weights, f"s3://bucket/weights/{name}", s3, 1) == [True] * 2


def test_weights_that_were_cut_short_in_the_store_are_refused(s3: dict[str, Any], tmp_path: Path) -> None:
    import s3fs

    url, store = "s3://bucket/weights/short.safetensors", s3fs.S3FileSystem(**s3)
    raw = foreign_weights.write_file(tmp_path / "weights", _module(1).state_dict()).read_bytes()
    store.pipe_file(url, raw[:-4])
    module = _module(-1)
    for wanted, kind, sentence in (
        (url, CheckpointCorrupted, f"'{url}' is no intact safetensors file"),
        ("s3://bucket/weights/nowhere", CheckpointNotFound, "'s3://bucket/weights/nowhere' does not exist"),
    ):
        with pytest.raises(kind, match=re.escape(sentence)):
            foreign_weights.load(wanted, module, storage_options=s3)
    assert _same(module, _module(-1))


def test_what_only_one_process_sees_is_refused_before_anything_is_written(worlds: Any, tmp_path: Path) -> None:
    sentence = (
        "saving 'memory://run/step-1' failed on 1 of 2 ranks: rank 1: this rank does not see what rank 0 writes into "
        "'memory://run/step-1'; give a folder that the hosts of all ranks share, or a URL such as s3://bucket/run."
    )
    assert worlds(2).run(save, "memory://run/step-1", None, [1], "sharded", None) == [sentence] * 2
    assert worlds(2).run(_in_memory) == [[], []]


def _saves_beside_its_own() -> tuple[str, list[str]]:
    """Save where each process sees another folder, in which rank 1 has a file of the name it would write."""
    import fsspec

    rank, store = int(os.environ["RANK"]), fsspec.filesystem("memory")
    if rank == 1:
        store.pipe_file("/other/step-1/model-00001-of-00002.safetensors", b"its own")
    with get_strategy("ddp") as strategy:
        model = strategy.setup_module(_module(1))
        with pytest.raises(CheckpointError) as error:
            strategy.save_checkpoint("memory://other/step-1", {"model": model})
    return str(error.value), [path.rpartition("/")[2] for path in store.find("/other")]


def test_a_host_with_a_folder_of_its_own_keeps_what_is_in_it(worlds: Any) -> None:
    first, second = worlds(2).run(_saves_beside_its_own)
    assert first[0] == second[0]
    assert "failed on 1 of 2 ranks: rank 1: this rank does not see what rank 0 writes into" in first[0]
    assert (first[1], second[1]) == ([], ["model-00001-of-00002.safetensors"])


def _in_memory() -> list[str]:
    import fsspec

    return list(fsspec.filesystem("memory").store)


def test_a_store_that_refuses_is_told_of_as_it_is(s3: dict[str, Any]) -> None:
    nowhere = {**s3, "client_kwargs": {**s3["client_kwargs"], "endpoint_url": "http://127.0.0.1:9"}}
    nowhere["config_kwargs"] = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    with pytest.raises(StorageError, match=r"the store of 's3://bucket/run' did not do what it was asked: "):
        latest("s3://bucket/run", storage_options=nowhere)
    with (
        get_strategy("single", accelerator="cpu") as strategy,
        pytest.raises(CheckpointError, match="bucket does not exist"),
    ):
        strategy.save_checkpoint("s3://no-such-bucket/run/step-1", {"step": 1}, storage_options=s3)


@pytest.mark.parametrize("size", [1 << 10, 40 << 20])
def test_an_upload_appears_when_it_is_finished_and_else_leaves_nothing(s3: dict[str, Any], size: int) -> None:
    import s3fs

    store = s3fs.S3FileSystem(**s3)
    folder = open_folder(f"s3://bucket/uploads-{size}", s3)
    data = memoryview(bytes(size))
    with folder.create("thrown-away", size) as file:
        file.write(data)
    with folder.create("kept", size) as file:
        file.write(data)
        assert not folder.holds("kept")
        file.finish()
    gc.collect()  # a client's file may send what it holds when it is collected
    assert [(each.name, each.bytes) for each in folder.listing()] == [("kept", size)]
    assert not store.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")


def _killed(s3: dict[str, Any], stride: int, seconds: float) -> list[str]:
    script = Path(__file__).with_name("killed_uploads.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(s3), str(stride)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    left: list[str] = json.loads(done.stdout)
    return left


@pytest.mark.long
def test_a_save_killed_at_some_requests_leaves_the_old_or_the_new_checkpoint(s3: dict[str, Any]) -> None:
    left = _killed(s3, 6, 200)
    assert len(left) > 3
    assert left == sorted(left, reverse=True)
    assert {left[0], left[-1]} == {"old", "new"}


@pytest.mark.long
def test_a_save_killed_at_any_request_leaves_the_old_or_the_new_checkpoint(s3: dict[str, Any]) -> None:
    left = _killed(s3, 1, 1800)
    assert len(left) > 15
    assert left == sorted(left, reverse=True)
    assert {left[0], left[-1]} == {"old", "new"}
