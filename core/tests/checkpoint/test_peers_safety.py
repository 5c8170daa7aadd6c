"""Crafted and damaged files of others: refused in a sentence, nothing executed, nothing outside the folder read."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import peer_weights
import pytest
import torch
from thread_ranks import on_ranks
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from shard_core.checkpoint.peers.loading import load_weights
from shard_core.checkpoint.tensor_state import TensorState
from shard_core.errors import CheckpointCorrupted


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self):
        return open, (str(self.made), "w")


@pytest.fixture
def bomb(tmp_path):
    """A bomb that has been seen to go off."""
    made = Bomb(tmp_path / "executed")
    pickle.loads(pickle.dumps(made))
    made.made.unlink()
    yield made
    assert not made.made.exists()


def _refused(path, match, module=None, **options):
    module = nn.Linear(2, 2) if module is None else module
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointCorrupted, match=match):
        peer_weights.load(path, module, **options)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)


NOT_EXECUTED = r"names _?io\.open, which would have to be executed"


@pytest.mark.parametrize("place", ["beside", "inside", "instead"])
def test_bombs_in_torch_files_do_not_go_off(tmp_path, bomb, place):
    state = nn.Linear(2, 2).state_dict()
    content = {"beside": {"model": state, "optim": bomb}, "inside": {"model": {**state, "x": bomb}}, "instead": bomb}
    path = peer_weights.write_torch(tmp_path / "weights.pt", content[place])
    _refused(path, NOT_EXECUTED, key="model")


def test_torch_does_not_advise_to_execute_what_is_in_a_file(tmp_path, bomb):
    path = peer_weights.write_torch(tmp_path / "weights.pt", bomb)
    with pytest.raises(CheckpointCorrupted) as raised:
        peer_weights.load(path, nn.Linear(2, 2))
    assert "weights_only" not in str(raised.value)
    assert "safe_globals" not in str(raised.value)


def test_a_class_that_somebody_allows_is_no_state_dict(tmp_path):
    with torch.serialization.safe_globals([Allowed]):
        path = peer_weights.write_torch(tmp_path / "weights.pt", Allowed())
        _refused(path, "holds a Allowed, not a state dict")


class Allowed:
    pass


def _metadata(folder, change):
    raw = (folder / ".metadata").read_bytes()
    content = pickle.loads(raw)
    changed = change(content)
    (folder / ".metadata").write_bytes(pickle.dumps(content if changed is None else changed))


@pytest.fixture
def folder(tmp_path):
    content = {"model": nn.Linear(2, 2).state_dict(), "optim": {"lr": 0.1}}
    return peer_weights.write_distributed(tmp_path / "folder", content)


@pytest.mark.parametrize("place", ["planner_data", "storage_data", "storage_meta", "version", "size", "instead"])
def test_bombs_in_the_metadata_do_not_go_off(folder, bomb, place):
    def plant(metadata):
        if place == "instead":
            return bomb
        if place == "size":
            metadata.state_dict_metadata["model.weight"].size = bomb
        else:
            setattr(metadata, place, bomb)
        return None

    _metadata(folder, plant)
    _refused(folder, r"\.metadata' names _?io\.open, which has no place in it", key="model")


def test_metadata_name_nothing_of_torch_that_does_something(folder, bomb):
    for name in ("load", "hub.load", "nn.Module", "Tensor", "save"):
        raw = b"\x80\x04" + b"\x8c\x05torch" + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        (folder / ".metadata").write_bytes(raw)
        _refused(folder, f"names torch.{name}, which has no place in it", key="model")


def test_metadata_change_no_class(folder):
    """A pickle may set attributes of whatever it has named, classes among them."""
    before = Metadata.__init__
    named = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    raw = named + pickle.dumps((None, {"__init__": "changed"}), protocol=2)[2:-1] + b"b."
    pickle.loads(raw)
    changed, Metadata.__init__ = Metadata.__init__, before
    assert changed == "changed"
    (folder / ".metadata").write_bytes(raw)
    _refused(folder, r"metadata' is damaged: TypeError", key="model")
    assert Metadata.__init__ is before


@pytest.mark.parametrize("name", ["model.weight", "model.bias"])  # nothing is touched before the last was looked at
def test_bombs_in_the_data_of_a_distributed_checkpoint_do_not_go_off(folder, bomb, name):
    (file,) = folder.glob("*.distcp")
    with file.open("ab") as stream:
        begin = stream.tell()
        torch.save(bomb, stream)
        length = stream.tell() - begin

    def point(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                info.offset, info.length = begin, length

    _metadata(folder, point)
    _refused(folder, NOT_EXECUTED, key="model")


def test_pickled_values_beside_the_tensors_are_never_read(folder, bomb):
    (file,) = folder.glob("*.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "optim.lr")
    raw = bytearray(file.read_bytes())
    planted = pickle.dumps(bomb)
    raw[info.offset : info.offset + len(planted)] = planted
    file.write_bytes(raw)
    assert peer_weights.load(folder, nn.Linear(2, 2), key="model") == ()


def _chunk(name, **changes):
    def change(metadata):
        for index, info in metadata.storage_data.items():
            if index.fqn == name:
                for field, value in changes.items():
                    setattr(info, field, value)

    return change


def _halved(metadata):
    metadata.state_dict_metadata["model.weight"].chunks[0].sizes = torch.Size([1, 2])


def _dropped(metadata):
    metadata.storage_data = {index: info for index, info in metadata.storage_data.items() if index.fqn != "model.bias"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_chunk("model.weight", relative_path="../x"), "which is not a file inside the folder"),
        (_chunk("model.weight", relative_path="/etc/passwd"), "which is not a file inside the folder"),
        (_chunk("model.weight", relative_path="__9_9.distcp"), "is not there, or no regular file"),
        (_chunk("model.weight", offset=10**12), "ends behind the end of the file"),
        (_chunk("model.weight", offset=-5), "is not laid out as torch does"),
        (_chunk("model.weight", length="long"), "is not laid out as torch does"),
        (_chunk("model.weight", offset=1), "was not written by torch.save"),
        (_chunk("model.weight", transform_descriptors=["zstd"]), "written through .'zstd'., which cannot be read"),
        (_halved, "'model.weight' is not covered exactly once"),
        (_dropped, "does not say where the part of 'model.bias' at"),
        (lambda metadata: "text", "is not laid out as torch does"),
        (lambda metadata: setattr(metadata, "state_dict_metadata", 3), "is not laid out as torch does"),
    ],
)
def test_metadata_that_contradict_the_files_are_refused(folder, change, sentence):
    _metadata(folder, change)
    _refused(folder, sentence, key="model")


def test_another_tensor_in_the_place_of_one_is_noticed(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = {index.fqn: info.offset for index, info in metadata.storage_data.items()}
    _metadata(folder, _chunk("model.weight", offset=places["model.bias"]))
    _refused(folder, r"should be float32 of shape \(2, 2\), but float32 of shape \(2,\) was read", key="model")


def _index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/hosts", "a/../../b", "C:\\x", "..\\x", "", "a\0b"])
def test_an_index_names_nothing_outside_its_folder(tmp_path, name):
    (tmp_path / "folder").mkdir()
    peer_weights.write_file(tmp_path / "outside.safetensors", nn.Linear(2, 2).state_dict())
    _index(tmp_path / "folder", {"weight": name, "bias": name})
    _refused(tmp_path / "folder", "which is not a file inside the folder")


def test_damaged_indexes_are_refused(tmp_path):
    folder = peer_weights.write_folder(tmp_path / "folder", nn.Linear(2, 2).state_dict(), files=2)
    first, second = sorted(each.name for each in folder.glob("*.safetensors"))
    for weight_map, sentence in (
        ({"weight": first, "bias": first}, "says that '(weight|bias)' is in .*, but it is not; 1 tensors are lacking"),
        ({"weight": 3}, "must be a string"),
        ({"weight": "model-9.safetensors", "bias": second}, "is not there, or no regular file"),
        ([], "must be a JSON object"),
    ):
        _index(folder, weight_map)
        _refused(folder, sentence)
    for raw in (b"[" * 10**6, b"\xff", b"null", b'{"weight_map": 1e999}'):
        (folder / "model.safetensors.index.json").write_bytes(raw)
        _refused(folder, "is no JSON|must be a JSON object")


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
        _header({"weight": WEIGHT, "bias": {"dtype": "F8_E8M0", "shape": [8], "data_offsets": [16, 24]}}),
        _header({"weight": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 24]}}),
        struct.pack("<Q", 2**60) + b"{" + b"\0" * 100,
        struct.pack("<Q", 10**6) + b'{"a":' + b"[" * 10**6,
        struct.pack("<Q", 9) + b"{",
    ],
)
def test_damaged_headers_are_refused(tmp_path, raw):
    (tmp_path / "model.safetensors").write_bytes(raw)
    _refused(tmp_path, "is no intact safetensors file|for which torch has none")


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    _refused(tmp_path, "no regular file")


def test_damaged_torch_files_are_refused(tmp_path):
    path = peer_weights.write_torch(tmp_path / "weights.pt", nn.Linear(2, 2).state_dict())
    whole = path.read_bytes()
    for raw in (whole[:-50], whole[:4], whole.replace(b"torch", b"torhc")):
        path.write_bytes(raw)
        _refused(path, "names torhc|is damaged, or holds more than tensors")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"")
    _refused(path, "is damaged, or holds more than tensors")
    peer_weights.write_torch(path, torch.ones(3))
    _refused(path, "holds a Tensor, not a state dict")
    for endless in ({}, {"a": torch.ones(1)}):
        endless["self"], endless["again"] = endless, endless
        peer_weights.write_torch(path, endless)
        _refused(path, "is nested too deeply")


def test_what_one_rank_cannot_read_keeps_every_rank_from_changing_anything(tmp_path):
    """Rank 0 finds out what there is; on a shared disk another rank may not see it yet."""
    path = peer_weights.write_folder(tmp_path / "folder", nn.Linear(2, 2).state_dict())

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
