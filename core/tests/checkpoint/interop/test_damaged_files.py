"""Damaged files of others, and such as lead out of their folder: refused in a sentence, nothing touched."""

from __future__ import annotations

import json
import os
import struct
import zipfile

import pytest
import torch
from fixtures import foreign_weights
from fixtures.thread_ranks import on_ranks
from torch import nn

from shard_core.checkpoint.interop.load_weights import load_weights
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointCorrupted


def _index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hosts", "a/../../b", "C:\\x", "..\\x", "", "a\0b"])
def test_an_index_names_nothing_outside_its_folder(tmp_path, name):
    (tmp_path / "folder").mkdir()
    foreign_weights.write_file(tmp_path / "outside.safetensors", nn.Linear(2, 2).state_dict())
    _index(tmp_path / "folder", {"weight": name, "bias": name})
    foreign_weights.refused(tmp_path / "folder", "which is not a file inside the folder")


def test_damaged_indexes_are_refused(tmp_path):
    folder = foreign_weights.write_folder(tmp_path / "folder", nn.Linear(2, 2).state_dict(), files=2)
    first, second = sorted(each.name for each in folder.glob("*.safetensors"))
    for weight_map, sentence in (
        ({"weight": first, "bias": first}, "says that '(weight|bias)' is in .*, but it is not; 1 tensors are lacking"),
        ({"weight": 3}, "must be a string"),
        ({"weight": "model-9.safetensors", "bias": second}, "is not there, or no regular file"),
        ([], "must be a JSON object"),
    ):
        _index(folder, weight_map)
        foreign_weights.refused(folder, sentence)
    for raw in (b"[" * 10**6, b"\xff", b"null", b'{"weight_map": 1e999}'):
        (folder / "model.safetensors.index.json").write_bytes(raw)
        foreign_weights.refused(folder, "is no JSON|must be a JSON object|must be an object")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "a", "weight": "b"}}')
    foreign_weights.refused(folder, "holds 'weight' twice in one object")
    (folder / "model.safetensors.index.json").unlink()
    os.mkfifo(folder / "model.safetensors.index.json")
    foreign_weights.refused(folder, "is no regular file")


def _header(table, data=b"\0" * 24):
    text = json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


WEIGHT = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@pytest.mark.parametrize(
    "raw",
    [
        _header({"weight": WEIGHT, "bias": {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}}, b"\0" * 20),
        _header({"weight": WEIGHT, "bias": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}}, b"\0" * 20),
        _header({"weight": WEIGHT, "bias": {"dtype": "F32", "shape": [3], "data_offsets": [16, 24]}}),
        _header({"weight": WEIGHT, "bias": {"dtype": "F99", "shape": [2], "data_offsets": [16, 24]}}),
        _header({"weight": WEIGHT, "bias": {"dtype": "F4", "shape": [16], "data_offsets": [16, 24]}}),
        _header({"weight": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 24]}}),
        struct.pack("<Q", 2**60) + b"{" + b"\0" * 100,
        struct.pack("<Q", 10**6) + b'{"a":' + b"[" * 10**6,
        struct.pack("<Q", 9) + b"{",
    ],
)
def test_damaged_headers_are_refused(tmp_path, raw):
    (tmp_path / "model.safetensors").write_bytes(raw)
    foreign_weights.refused(tmp_path, "is no intact safetensors file|for which torch has none")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    foreign_weights.refused(tmp_path, "no regular file")


def test_damaged_torch_files_are_refused(tmp_path):
    path = foreign_weights.write_torch(tmp_path / "weights.pt", nn.Linear(2, 2).state_dict())
    whole = path.read_bytes()
    for raw in (whole[:-50], whole[:4], whole.replace(b"torch", b"torhc")):
        path.write_bytes(raw)
        foreign_weights.refused(path, "names torhc|is damaged, or holds more than tensors")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"")
    foreign_weights.refused(path, "is damaged, or holds more than tensors")
    foreign_weights.write_torch(path, torch.ones(3))
    foreign_weights.refused(path, "holds a Tensor, not a state dict")
    for endless in ({}, {"a": torch.ones(1)}):
        endless["self"], endless["again"] = endless, endless
        foreign_weights.write_torch(path, endless)
        foreign_weights.refused(path, "is nested too deeply")


def test_what_one_rank_cannot_read_keeps_every_rank_from_changing_anything(tmp_path):
    """Rank 0 finds out what there is; on a shared disk another rank may not see it yet."""
    path = foreign_weights.write_folder(tmp_path / "folder", nn.Linear(2, 2).state_dict())

    def on_rank(coordinator):
        module = nn.Linear(2, 2)
        before = module.weight.clone()
        state = _Late(path / "model.safetensors", module, coordinator)
        with pytest.raises(CheckpointCorrupted, match=r"model\.safetensors' is not there, or no regular file"):
            load_weights(path, state, coordinator=coordinator)
        assert torch.equal(module.weight, before)

    for result in on_ranks(2, on_rank):
        assert result is None, result


class _Late(TensorState):
    """A state whose rank 0 moves the file away once it has looked at it."""

    def __init__(self, file, module, coordinator):
        super().__init__({"model": module}, {}, rank=coordinator.rank, world_size=2)
        self._file, self._coordinator = file, coordinator

    def prepare_load(self, slots):
        super().prepare_load(slots)
        if self._coordinator.rank == 0:
            self._file.rename(self._file.with_suffix(".moved"))
        self._coordinator.barrier()
