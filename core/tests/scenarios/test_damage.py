"""Every changed byte and every missing one is noticed, whatever it belongs to, before anything is touched."""

from __future__ import annotations

import itertools
import random
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures.small_checkpoint import judged, refusal, write

from shard_core.checkpoint.save.commit import Attempt
from shard_core.checkpoint.storage.local import LocalFolder

_SPARSE = 97


@pytest.fixture(params=["sharded", "full"])
def checkpoint(request, tmp_path):
    path = tmp_path / "run" / "step-1"
    write(path, form=request.param)
    return path


def _header_bytes(raw: bytes) -> int:
    """Count the bytes of a safetensors file before its data."""
    (length,) = struct.unpack("<Q", raw[:8])
    return 8 + int(length)


def _changed_bytes(raw: bytes, *, often: bool) -> Iterator[tuple[int, bytes]]:
    """Change each byte in turn: a bit of it or all of it, or often, both."""
    choose = random.Random(0)
    for place, byte in enumerate(raw):
        changes = [byte ^ (1 << choose.randrange(8)), choose.choice([each for each in range(256) if each != byte])]
        for other in changes if often else changes[place % 2 :][:1]:
            yield place, raw[:place] + bytes([other]) + raw[place + 1 :]


def _assert_noticed(checkpoint: Path, name: str, place: int, *, by_load: bool) -> None:
    verdict = judged(checkpoint)
    assert verdict is None or not verdict.is_fine, (name, place)
    if by_load:
        assert refusal(checkpoint) is not None, (name, place)


def _sweep(checkpoint: Path, stride: int) -> None:
    """Change every byte of every file; of those changes every so many are also loaded."""
    assert refusal(checkpoint) is None
    for path in sorted(checkpoint.iterdir()):
        raw = path.read_bytes()
        # Nobody needs the header of a tensor file to load it: the index says where everything is.
        unread = 0 if path.name.startswith(("manifest", "index")) else _header_bytes(raw)
        for number, (place, changed) in enumerate(_changed_bytes(raw, often=stride == 1)):
            path.write_bytes(changed)
            if place < unread:
                verdict = judged(checkpoint)
                assert verdict is not None
                assert [damage.file for damage in verdict.damage] == [path.name], place
                assert number % stride or refusal(checkpoint) is None, place
            else:
                _assert_noticed(checkpoint, path.name, place, by_load=number % stride == 0)
        path.write_bytes(raw)


@pytest.mark.slow
def test_every_changed_byte_is_noticed(tmp_path):
    write(tmp_path / "checkpoint")
    _sweep(tmp_path / "checkpoint", stride=_SPARSE)


@pytest.mark.long
def test_no_changed_byte_is_ever_loaded(checkpoint):
    _sweep(checkpoint, stride=1)


@pytest.mark.parametrize("stride", [_SPARSE, pytest.param(1, marks=pytest.mark.long)])
def test_files_cut_short_or_grown_are_noticed(checkpoint, stride):
    for path in sorted(checkpoint.iterdir()):
        raw = path.read_bytes()
        for length in [*range(0, len(raw), stride), len(raw) - 1]:
            path.write_bytes(raw[:length])
            _assert_noticed(checkpoint, path.name, length, by_load=True)
        for more in (b"\0", b"\n", raw):
            path.write_bytes(raw + more)
            _assert_noticed(checkpoint, path.name, len(raw), by_load=True)
        path.write_bytes(raw)


def test_files_of_a_checkpoint_of_equal_shape_are_noticed(checkpoint):
    other, mixed = checkpoint.parent / "step-2", checkpoint.parent / "mixed"
    write(other, seed=1, form="full" if (checkpoint / "checkpoint.safetensors").exists() else "sharded")
    names = sorted(path.name for path in other.iterdir())
    assert names == sorted(path.name for path in checkpoint.iterdir())
    unlike = {name for name in names if (checkpoint / name).read_bytes() != (other / name).read_bytes()}
    assert len(unlike) >= 3
    for count in range(1, len(names)):
        for swapped in itertools.combinations(names, count):
            if unlike & {*swapped} in (set(), unlike):
                continue  # a whole checkpoint, one or the other
            shutil.copytree(checkpoint, mixed)
            for name in swapped:
                shutil.copy(other / name, mixed)
            _assert_noticed(mixed, ", ".join(swapped), 0, by_load=True)
            shutil.rmtree(mixed)


def test_missing_files_are_noticed_and_further_ones_are_nobodys(checkpoint):
    for path in sorted(checkpoint.iterdir()):
        raw = path.read_bytes()
        path.unlink()
        _assert_noticed(checkpoint, path.name, 0, by_load=True)
        path.write_bytes(raw)
    dead = Attempt.begin(LocalFolder(checkpoint), 2)
    for name in (dead.rank_index_file(0), dead.tensor_file("model", 1), dead.single_file("index")):
        (checkpoint / name).write_bytes(b"left by a save that died")
    (checkpoint / "model-00007-of-00009.safetensors").write_bytes(b"nobody's")
    (checkpoint / "model.safetensors").write_bytes(b"nobody's")
    assert refusal(checkpoint) is None
    verdict = judged(checkpoint)
    assert verdict is not None
    assert verdict.is_fine
