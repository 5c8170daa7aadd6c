from __future__ import annotations

import os
import shutil

import pytest
import torch
from fixtures.single_rank import load, save
from fixtures.small_checkpoint import forge, seal
from torch import nn

from shard_core.checkpoint.inspection.verify import verify
from shard_core.errors import CheckpointCorrupted, CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    path = tmp_path / "run" / "step-1"
    save(path, module, optimizer, {"step": 1, "t": torch.ones(2)})
    return path


def _load_unchanged(path, error=CheckpointCorrupted):
    module = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    with pytest.raises(error) as raised:
        load(path, module, optimizer)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert optimizer.state_dict()["state"] == {}
    assert optimizer.param_groups[0]["lr"] == 0.5
    return str(raised.value)


def _set(*path_and_value):
    *path, last, value = path_and_value

    def change(content):
        for step in path:
            content = content[step]
        content[last] = value

    return change


HOSTILE = {
    "absolute path": _set("files", 0, "path", "/etc/passwd"),
    "parent": _set("files", 0, "path", "../step-2/model-00000-of-00001.safetensors"),
    "manifest as file": _set("files", 0, "path", "manifest.json"),
    "one file twice": lambda content: content["files"].append(content["files"][0]),
    "index elsewhere": _set("index", "path", "/etc/passwd"),
    "negative length": _set("files", 0, "bytes", -5),
    "float length": _set("files", 0, "bytes", 1e3),
    "boolean length": _set("files", 0, "bytes", True),
    "huge length": _set("files", 0, "bytes", 2**80),
    "other length": _set("files", 0, "bytes", 4711),
    "huge tensor": _set("tensors", "model.weight", ["F32", 2**40, 2**40]),
    "negative dim": _set("tensors", "model.weight", ["F32", -2, -3]),
    "many dims": _set("tensors", "model.weight", ["F32", *[1] * 10_000]),
    "unknown dtype": _set("tensors", "model.weight", ["F31", 2, 3]),
    "no dtype": _set("tensors", "model.weight", []),
    "tensor of text": _set("tensors", "model.weight", "F32"),
    "other shape": _set("tensors", "model.weight", ["F32", 6]),
    "larger tensor": _set("tensors", "model.weight", ["F32", 2, 4]),
    "one tensor more": _set("tensors", "model.more", ["F32", 1]),
    "one tensor less": lambda content: content["tensors"].pop("model.weight"),
    "tensors as list": _set("tensors", []),
    "alias of nothing": _set("aliases", {"model.a": "model.b"}),
    "alias of itself": _set("aliases", {"model.weight": "model.weight"}),
    "alias of a number": _set("aliases", {"model.a": 3}),
    "modules of numbers": _set("modules", {"model": 3}),
    "another format": _set("format", "zip"),
    "a newer version": _set("version", 2),
    "a boolean version": _set("version", True),
    "no values": lambda content: content.pop("values"),
    "values as list": _set("values", []),
    "value names no tensor": _set("values", "t", {"$tensor": "state.other"}),
    "value names a number": _set("values", "t", {"$tensor": 3}),
    "unknown mark": _set("values", "t", {"$pickle": "..."}),
    "optimizer of nothing": _set("optimizers", "optimizer", None),
    "optimizer without groups": lambda content: content["optimizers"]["optimizer"].pop("groups"),
    "group without names": _set("optimizers", "optimizer", "groups", [{"lr": 1.0}]),
    "scalars by number": _set("optimizers", "optimizer", "scalars", {"weight": 3}),
    "no ranks": _set("world_size", 0),
    "attempt": _set("attempt", "../../../etc"),
    "form": _set("form", "pickle"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_manifests_are_refused_before_anything_is_touched(checkpoint, change):
    forge(checkpoint, change)
    assert _load_unchanged(checkpoint)


def test_deep_json_is_refused(checkpoint):
    forge(checkpoint, _set("values", "step", "DEEP"))
    body = (checkpoint / "manifest.json").read_bytes().rpartition(b', "digest"')[0]
    body = body.replace(b'"DEEP"', b"[" * 200_000 + b"]" * 200_000)
    seal(checkpoint, body)
    assert "no JSON that can be read" in _load_unchanged(checkpoint)


@pytest.mark.parametrize("kind", ["model", "optim", "state", "index"])
def test_links_pipes_and_folders_are_no_files_of_a_checkpoint(checkpoint, kind):
    (path,) = checkpoint.glob(f"{kind}*")
    elsewhere = checkpoint.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert "cannot be opened as a file of a checkpoint" in _load_unchanged(checkpoint)
    path.unlink()
    os.mkfifo(path)
    assert "no regular file" in _load_unchanged(checkpoint)
    path.unlink()
    path.mkdir()
    assert _load_unchanged(checkpoint)
    path.rmdir()
    assert "No such file" in _load_unchanged(checkpoint)
    path.write_bytes(elsewhere.read_bytes()[:-1])
    assert "was cut short or replaced" in _load_unchanged(checkpoint)


def test_a_manifest_behind_a_link_is_refused(checkpoint):
    elsewhere = checkpoint.parent / "elsewhere.json"
    (checkpoint / "manifest.json").rename(elsewhere)
    (checkpoint / "manifest.json").symlink_to(elsewhere)
    assert "cannot be opened" in _load_unchanged(checkpoint)


def test_a_folder_behind_a_link_is_a_checkpoint(checkpoint):
    (checkpoint.parent / "newest").symlink_to(checkpoint)
    load(checkpoint.parent / "newest", nn.Linear(3, 2))


def test_files_of_another_checkpoint_are_noticed(checkpoint):
    other = checkpoint.parent / "step-2"
    save(other, nn.Linear(3, 2), values={"t": torch.zeros(2)})
    shutil.copy(next(other.glob("model*")), checkpoint)
    message = _load_unchanged(checkpoint)
    assert "2 tensors are damaged: 'model.weight' in model-00000-of-00001.safetensors, 'model.bias'" in message
    shutil.copy(next(other.glob("index*")), checkpoint)
    assert _load_unchanged(checkpoint, CheckpointError)


def test_a_flipped_byte_is_named_by_its_tensor(checkpoint):
    path = next(checkpoint.glob("optim*"))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))
    assert "1 tensor is damaged: 'optim." in _load_unchanged(checkpoint)
    (damage,) = verify(checkpoint).damage
    assert damage.tensor
    assert damage.tensor.startswith("optim.")
