"""Pickles that would execute something: refused in a sentence, and nothing executed."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from fixtures import foreign_weights
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

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


NOT_EXECUTED = r"names _?io\.open, which would have to be executed"


@pytest.mark.parametrize("place", ["beside", "inside", "instead"])
def test_bombs_in_torch_files_do_not_go_off(tmp_path, bomb, place):
    state = nn.Linear(2, 2).state_dict()
    content = {"beside": {"model": state, "optim": bomb}, "inside": {"model": {**state, "x": bomb}}, "instead": bomb}
    path = foreign_weights.write_torch(tmp_path / "weights.pt", content[place])
    foreign_weights.refused(path, NOT_EXECUTED, key="model")


def test_torch_does_not_advise_to_execute_what_is_in_a_file(tmp_path, bomb):
    path = foreign_weights.write_torch(tmp_path / "weights.pt", bomb)
    with pytest.raises(CheckpointCorrupted) as raised:
        foreign_weights.load(path, nn.Linear(2, 2))
    assert "weights_only" not in str(raised.value)
    assert "safe_globals" not in str(raised.value)


def test_a_class_that_somebody_allows_is_no_state_dict(tmp_path):
    with torch.serialization.safe_globals([Allowed]):
        path = foreign_weights.write_torch(tmp_path / "weights.pt", Allowed())
        foreign_weights.refused(path, "holds a Allowed, not a state dict")


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
    return foreign_weights.write_distributed(tmp_path / "folder", content)


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
    foreign_weights.refused(folder, r"\.metadata' names _?io\.open, which has no place in it", key="model")


def test_metadata_name_nothing_of_torch_that_does_something(folder, bomb):
    for name in ("load", "hub.load", "nn.Module", "Tensor", "save"):
        raw = b"\x80\x04" + b"\x8c\x05torch" + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
        (folder / ".metadata").write_bytes(raw)
        foreign_weights.refused(folder, f"names torch.{name}, which has no place in it", key="model")


def test_metadata_change_no_class(folder):
    """A pickle may set attributes of whatever it has named, classes among them."""
    before = Metadata.__init__
    named = b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n"
    raw = named + pickle.dumps((None, {"__init__": "changed"}), protocol=2)[2:-1] + b"b."
    pickle.loads(raw)
    changed, Metadata.__init__ = Metadata.__init__, before
    assert changed == "changed"
    (folder / ".metadata").write_bytes(raw)
    foreign_weights.refused(folder, r"metadata' is damaged: TypeError", key="model")
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
    foreign_weights.refused(folder, NOT_EXECUTED, key="model")


def test_pickled_values_beside_the_tensors_are_never_read(folder, bomb):
    (file,) = folder.glob("*.distcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "optim.lr")
    raw = bytearray(file.read_bytes())
    planted = pickle.dumps(bomb)
    raw[info.offset : info.offset + len(planted)] = planted
    file.write_bytes(raw)
    assert foreign_weights.load(folder, nn.Linear(2, 2), key="model") == ()


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
    foreign_weights.refused(folder, sentence, key="model")


def test_another_tensor_in_the_place_of_one_is_noticed(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    places = {index.fqn: info.offset for index, info in metadata.storage_data.items()}
    _metadata(folder, _chunk("model.weight", offset=places["model.bias"]))
    sentence = r"should be float32 of shape \(2, 2\), but float32 of shape \(2,\) was read"
    foreign_weights.refused(folder, sentence, key="model")
