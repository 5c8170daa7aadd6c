"""The verbs of ``shard checkpoint`` on a store."""

from __future__ import annotations

import json

import fsspec
import pytest
from click.testing import CliRunner
from written_checkpoints import write

from shard_core.cli.main import main


@pytest.fixture
def store():
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    write("memory://run", 1, 2, 3)
    return filesystem


def _shard(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(main, ["checkpoint", *map(str, arguments)])


def test_inspect(store):
    listed = json.loads(_shard("inspect", "memory://run", "--json").stdout)
    assert [each["path"] for each in listed["checkpoints"]] == [f"memory://run/step-{step}" for step in (1, 2, 3)]
    card = json.loads(_shard("inspect", "memory://run/step-2", "--json").stdout)
    assert (card["path"], card["step"], card["integrity"]["problems"]) == ("memory://run/step-2", 2, [])
    missing = _shard("inspect", "memory://nowhere")
    assert (missing.exit_code, missing.stderr) == (2, "Error: 'memory://nowhere' does not exist.\n")


def test_verify_and_compare(store, tmp_path):
    assert _shard("verify", "memory://run/step-2").exit_code == 0
    write(tmp_path, 2)
    assert _shard("compare", "memory://run/step-2", tmp_path / "step-2").exit_code == 0
    assert _shard("compare", "memory://run/step-2", "memory://run/step-3").exit_code == 1
    key = next(key for key in store.store if "step-2/model" in key)
    whole = bytearray(store.cat_file(key))
    whole[-1] ^= 1
    store.pipe_file(key, bytes(whole))
    damaged = _shard("verify", "memory://run/step-2")
    assert (damaged.exit_code, "its bytes are not those" in damaged.stdout) == (1, True)


def test_export(store, tmp_path):
    done = _shard("export", "memory://run/step-2", tmp_path / "out", "--dtype", "bf16")
    assert done.exit_code == 0, done.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    refused = _shard("export", "memory://run/step-2", "memory://out")
    assert (refused.exit_code, "goes to a disk" in refused.stderr) == (2, True)


def test_prune(store):
    store.pipe_file("/run/step-9/model-00000-of-00002.safetensors", b"cut short")
    store.pipe_file("/run/step-9/part-00000-of-00002-0123456789ab.safetensors", b"")
    shown = _shard("prune", "memory://run", "--keep-last", 1, "--dry-run", "--json")
    entries = {each["path"]: each["removes"] for each in json.loads(shown.stdout)["entries"]}
    assert entries == {
        "memory://run/step-1": "all",
        "memory://run/step-2": "all",
        "memory://run/step-3": "nothing",
        "memory://run/step-9": "nothing",
    }
    assert _shard("prune", "memory://run", "--keep-last", 1, "--leftovers", "--yes").exit_code == 0
    assert {key.split("/")[2] for key in store.store} == {"step-3"}


def test_storage_options(store):
    # A store of its own, in which nothing is.
    alone = _shard("verify", "memory://run/step-2", "--storage-option", "global_store=false")
    assert (alone.exit_code, "does not exist" in alone.stderr) == (2, True)
    for typed in ("global_store", "=x"):
        refused = _shard("verify", "memory://run/step-2", "--storage-option", typed)
        assert refused.exit_code == 2
        assert f"'{typed}' is no option of a store; write it like KEY=VALUE" in refused.stderr
    assert "leave them out" in _shard("compare", "run", "run", "--storage-option", "a=b").stderr
