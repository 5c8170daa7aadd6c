"""Every kind of file that weights are read from, bit for bit, whatever is in it and however it is sharded."""

from __future__ import annotations

import re
import struct

import pytest
import torch
from fixtures import foreign_weights
from fixtures.single_rank import load as load_checkpoint
from fixtures.single_rank import save as save_checkpoint
from torch import nn

from shard_core.errors import CheckpointError, CheckpointNotFound, InvalidOption


def _tensors():
    torch.manual_seed(0)
    numbers = torch.randn(7, 5, 3)
    made = {str(dtype).removeprefix("torch."): numbers.to(dtype) for dtype in (
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.complex64, torch.int8, torch.int16, torch.int64, torch.uint8, torch.uint16, torch.bool,
    )}  # fmt: skip
    return made | {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "odd": torch.tensor([float("nan"), -0.0, float("inf")]),
        "one": torch.ones(1),
    }


WRITERS = {
    "file": lambda path, tensors: foreign_weights.write_file(path / "weights", tensors),
    "folder": lambda path, tensors: foreign_weights.write_folder(path / "folder", tensors),
    "index": lambda path, tensors: foreign_weights.write_folder(path / "folder", tensors, files=3),
    "torch": lambda path, tensors: foreign_weights.write_torch(path / "weights.bin", tensors),
    "distributed": lambda path, tensors: foreign_weights.write_distributed(path / "folder", dict(tensors)),
}


def _bits(tensor):
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("kind", WRITERS)
def test_every_dtype_and_shape_arrives_bit_for_bit_in_flat_shards(tmp_path, kind, ranks):
    tensors = _tensors()
    path = WRITERS[kind](tmp_path, tensors)
    loaded = foreign_weights.load_flat(path, tensors, ranks)
    assert {name: _bits(tensor) for name, tensor in loaded.items()} == {n: _bits(t) for n, t in tensors.items()}


def test_torch_files_keep_what_safetensors_cannot(tmp_path):
    base = torch.randn(6, 4)
    tensors = {
        "complex128": torch.randn(3, dtype=torch.complex128),
        "conjugated": torch.randn(3, 2, dtype=torch.complex64).conj(),
        "strided": base[::2, 1:3],
        "turned": base.t(),
    }
    loaded = foreign_weights.load_flat(foreign_weights.write_torch(tmp_path / "weights.pt", tensors), tensors, 2)
    torch.testing.assert_close(loaded, {name: t.resolve_conj() for name, t in tensors.items()}, rtol=0, atol=0)


def _nested(module):
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"net": module.state_dict(), "optim": optimizer.state_dict(), "step": 3}


@pytest.mark.parametrize("write", [foreign_weights.write_torch, foreign_weights.write_distributed])
def test_of_several_state_dicts_one_is_chosen(tmp_path, write):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    path = write(tmp_path / "weights", _nested(module))
    choices = r"say which with key=\.\.\.: 'net' \(2 tensors\), 'optim' \(6 tensors\)\."
    for key, sentence in {
        None: "holds its tensors under keys; ",
        "nett": r"holds nothing under key='nett'; did you mean 'net'\? To choose, ",
        "step": "holds nothing under key='step'. To choose, ",
    }.items():
        with pytest.raises(InvalidOption, match=sentence + choices):
            foreign_weights.load(path, other, key=key)
    assert foreign_weights.load(path, other, key="net") == ()
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("write", [foreign_weights.write_torch, foreign_weights.write_distributed])
def test_state_dicts_further_inside_are_found(tmp_path, write):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    path = write(tmp_path / "weights", {"app": _nested(module)})
    with pytest.raises(InvalidOption, match=r"'app\.net' \(2 tensors\), 'app\.optim' \(6 tensors\)"):
        foreign_weights.load(path, other)
    foreign_weights.load(path, other, key="app.net")
    assert torch.equal(other.weight, module.weight)


def test_where_there_is_one_state_dict_there_is_nothing_to_choose(tmp_path):
    module = nn.Linear(2, 2)
    state = module.state_dict()
    for path in (
        foreign_weights.write_torch(tmp_path / "weights.pt", state),
        foreign_weights.write_distributed(tmp_path / "distributed", dict(state)),
        foreign_weights.write_folder(tmp_path / "folder", state),
    ):
        with pytest.raises(InvalidOption, match=r"leave (it|key) out"):
            foreign_weights.load(path, module, key="model")


def test_links_are_followed_as_caches_are_made_of_them(tmp_path):
    tensors = _tensors()
    blobs = foreign_weights.write_folder(tmp_path / "blobs", tensors, files=2)
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    loaded = foreign_weights.load_flat(snapshot, tensors, 2)
    assert all(_bits(loaded[name]) == _bits(tensor) for name, tensor in tensors.items())


def test_headers_of_any_length_are_read(tmp_path):
    """Writers need not align; torch's views then begin between two elements."""
    header = b'{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}'
    for padding in range(4):
        raw = struct.pack("<Q", len(header) + padding) + header + b" " * padding + struct.pack("<3f", 1, 2, 3)
        (tmp_path / "weights").write_bytes(raw)
        like = {"w": torch.zeros(3)}
        assert foreign_weights.load_flat(tmp_path / "weights", like, 2)["w"].tolist() == [1, 2, 3]


def test_which_of_several_files_is_meant_must_be_seen(tmp_path):
    module = nn.Linear(2, 2)
    folder = foreign_weights.write_folder(tmp_path / "folder", module.state_dict(), files=2)
    index = folder / "model.safetensors.index.json"
    foreign_weights.load(index, module)
    foreign_weights.write_file(folder / "model.safetensors", nn.Linear(3, 3).state_dict())  # of an earlier save
    with pytest.raises(InvalidOption, match=r"holds 'model\.safetensors\.index\.json', 'model\.safetensors', and it"):
        foreign_weights.load(folder, module)
    (folder / "model.safetensors").unlink()
    index.unlink()
    with pytest.raises(InvalidOption, match=r"cannot be seen which of them is meant; give the path of one"):
        foreign_weights.load(folder, module)


def test_paths_without_weights_get_a_sentence(tmp_path):
    module = nn.Linear(2, 2)
    (tmp_path / "bins").mkdir()
    foreign_weights.write_torch(tmp_path / "bins" / "pytorch_model.bin", module.state_dict())
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "pytorch_model.bin.index.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("{}")
    (tmp_path / "empty").mkdir()
    torch.save(module.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name, sentence in {
        "weightz": "does not exist.",
        "note.txt": "does not exist; did you mean 'notes.txt'?",
        "notes.txt": "holds no weights that can be read; they may be in a folder of safetensors files",
        "empty": "holds no weights that can be read",
        "bins": "holds no safetensors files, but 'pytorch_model.bin'; give the path of a file to read that",
        "several": "holds several files of torch.save with an index, which is not read",
        "old.pt": "is a pickle, as torch.save wrote it before torch 1.6",
    }.items():
        with pytest.raises(CheckpointNotFound, match=re.escape(sentence)):
            foreign_weights.load(tmp_path / name, module)


def test_each_method_sends_to_the_other(tmp_path):
    module = nn.Linear(2, 2)
    save_checkpoint(tmp_path / "c", module)
    with pytest.raises(CheckpointError, match=r"is a checkpoint of Shard's own; load_checkpoint\(\) loads it"):
        foreign_weights.load(tmp_path / "c", module)
    for path in (
        foreign_weights.write_folder(tmp_path / "one", module.state_dict()),
        foreign_weights.write_folder(tmp_path / "several", module.state_dict(), files=2),
        foreign_weights.write_distributed(tmp_path / "distributed", dict(module.state_dict())),
        foreign_weights.write_file(tmp_path / "file", module.state_dict()),
        foreign_weights.write_torch(tmp_path / "torch.pt", module.state_dict()),
    ):
        with pytest.raises(CheckpointNotFound, match=r"holds weights .* load_weights\(\) loads them\."):
            load_checkpoint(path, module)
