"""Whatever a file of a checkpoint is replaced with, nothing in it is ever executed."""

from __future__ import annotations

import base64
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy
import torch
import xxhash
from click.testing import CliRunner
from fixtures.opened_files import opened_files
from fixtures.small_checkpoint import forge, judged, refusal, write

from shard_core.checkpoint.interop.hf_export import export
from shard_core.checkpoint.save.rank_index import decode_rank_index
from shard_core.cli.main import main
from shard_core.errors import CheckpointCorrupted, ShardError


class _Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, fuse: Path) -> None:
        self._fuse = fuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._fuse,)


@pytest.fixture
def fuse(tmp_path):
    """Return the path that exists once something was executed."""
    path = tmp_path / "executed"
    pickle.loads(pickle.dumps(_Bomb(path)))
    assert path.exists()  # it would
    path.unlink()
    return path


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "run" / "step-1"
    write(path)
    return path


def _bombs(fuse: Path, folder: Path) -> dict[str, bytes]:
    torch.save({"model": _Bomb(fuse)}, folder / "bomb.pt")
    return {
        **{f"protocol {number}": pickle.dumps(_Bomb(fuse), protocol=number) for number in range(6)},
        "torch.save": (folder / "bomb.pt").read_bytes(),
    }


def _use_in_every_way(path: Path) -> None:
    """Do with a checkpoint whatever can be done with one; each may refuse, none may do what it says."""
    refusal(path)
    judged(path)
    for verb in (["inspect", path], ["inspect", path.parent], ["verify", path], ["compare", path, path]):
        result = CliRunner().invoke(main, ["checkpoint", *map(str, verb)])
        assert result.exception is None or isinstance(result.exception, SystemExit), verb
    try:
        export(path, path.parent.parent / "exported")
    except ShardError:
        pass
    finally:
        shutil.rmtree(path.parent.parent / "exported", ignore_errors=True)


@pytest.mark.parametrize("name", ["manifest.json", "index", "model", "optim", "state"])
def test_pickles_in_the_place_of_files_are_not_executed(checkpoint, fuse, tmp_path, name):
    (path,) = checkpoint.glob(f"{name}*")
    for raw in _bombs(fuse, tmp_path).values():
        path.write_bytes(raw)
        assert refusal(checkpoint) is not None
        _use_in_every_way(checkpoint)
        assert not fuse.exists()


@pytest.mark.parametrize("name", ["index", "model", "optim", "state"])
def test_pickles_a_manifest_vouches_for_are_not_executed(checkpoint, fuse, tmp_path, name):
    (path,) = checkpoint.glob(f"{name}*")
    for raw in _bombs(fuse, tmp_path).values():
        path.write_bytes(raw)
        record = {"path": path.name, "bytes": len(raw), "digest": xxhash.xxh3_64_hexdigest(raw)}

        def vouch(content, record=record):
            content["files"] = [record if each["path"] == record["path"] else each for each in content["files"]]
            content["index"] = record if content["index"]["path"] == record["path"] else content["index"]

        forge(checkpoint, vouch)
        assert refusal(checkpoint) is not None
        _use_in_every_way(checkpoint)
        assert not fuse.exists()


def test_pickles_beside_the_files_are_not_opened(checkpoint, fuse, tmp_path):
    names = {".metadata", "__0_0.distcp", "model.pt", "pytorch_model.bin", "optim-00001-of-00002.safetensors", "a.pkl"}
    for name, raw in zip(sorted(names), _bombs(fuse, tmp_path).values(), strict=False):
        (checkpoint / name).write_bytes(raw)
    with opened_files() as opened:
        assert refusal(checkpoint) is None
        _use_in_every_way(checkpoint)
    assert not {Path(path).name for path in opened} & names
    assert not fuse.exists()


@pytest.mark.parametrize(
    "wrap", [lambda text: text, lambda text: {"$pickle": text}, lambda text: {"$dict": [[text, text]]}]
)
def test_pickles_among_the_values_stay_text(checkpoint, fuse, tmp_path, wrap):
    for raw in _bombs(fuse, tmp_path).values():
        text = wrap(base64.b64encode(raw).decode())
        for place in ("values", "information", "optimizers"):
            shutil.copytree(checkpoint, tmp_path / "forged" / "step-1")
            forge(
                tmp_path / "forged" / "step-1", lambda content, place=place, text=text: content[place].update(bomb=text)
            )
            _use_in_every_way(tmp_path / "forged" / "step-1")
            shutil.rmtree(tmp_path / "forged")
        assert not fuse.exists()


def test_pickles_in_the_place_of_a_part_record_are_not_executed(fuse, tmp_path):
    for raw in [*_bombs(fuse, tmp_path).values(), b"", safetensors.numpy.save({})]:
        with pytest.raises(CheckpointCorrupted):
            decode_rank_index(raw, "0123456789ab")
    assert not fuse.exists()
