"""Weights are read from stores as from disks, and no more of them than is needed."""

from __future__ import annotations

import fsspec
import pytest
import torch
from fixtures import foreign_weights
from test_formats import WRITERS
from torch import nn

from shard_core.errors import CheckpointCorrupted, CheckpointMismatch, CheckpointNotFound, InvalidOption

URL = "memory://weights"


@pytest.fixture
def store():
    """Return an empty store."""
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


def _upload(path):
    """Upload a file or a folder to the store, and return its URL."""
    url = f"{URL}/{path.name}"
    for file in [path] if path.is_file() else path.iterdir():
        fsspec.filesystem("memory").pipe(f"{url}/{file.name}" if path.is_dir() else url, file.read_bytes())
    return url


def _tensors():
    torch.manual_seed(0)
    return {"wide": torch.randn(64, 48), "half": torch.randn(9, 5).bfloat16(), "one": torch.tensor(2.5)}


@pytest.mark.parametrize("kind", WRITERS)
def test_ranks_read_from_a_store_what_they_read_from_a_disk(tmp_path, store, kind):
    tensors = _tensors()
    url = _upload(WRITERS[kind](tmp_path, tensors))
    torch.testing.assert_close(foreign_weights.load_flat(url, tensors, 3), tensors, rtol=0, atol=0)


def test_an_index_is_read_with_the_files_beside_it(tmp_path, store):
    tensors = _tensors()
    url = _upload(foreign_weights.write_folder(tmp_path / "folder", tensors, files=3))
    found = foreign_weights.load_flat(f"{url}/model.safetensors.index.json", tensors, 2)
    torch.testing.assert_close(found, tensors, rtol=0, atol=0)


def test_each_rank_asks_for_its_own_part(tmp_path, store, monkeypatch):
    tensors = {"large": torch.randn(1000, 100)}
    url = _upload(foreign_weights.write_file(tmp_path / "weights", tensors))
    asked = []
    fetch = type(store).cat_ranges

    def counting(self, paths, starts, ends, **options):
        asked.extend(end - start for start, end in zip(starts, ends, strict=True))
        return fetch(self, paths, starts, ends, **options)

    monkeypatch.setattr(type(store), "cat_ranges", counting)
    foreign_weights.load_flat(url, tensors, 4)
    assert sum(asked) < 1.1 * tensors["large"].nbytes
    assert max(asked) == tensors["large"].nbytes // 4


def test_what_is_wrong_is_told_of_the_url(tmp_path, store):
    url = _upload(foreign_weights.write_folder(tmp_path / "folder", nn.Linear(2, 2).state_dict()))
    with pytest.raises(CheckpointMismatch, match=f"'{url}' and the module differ"):
        foreign_weights.load(url, nn.Linear(3, 2))
    with pytest.raises(CheckpointNotFound, match=f"'{URL}/nowhere' does not exist"):
        foreign_weights.load(f"{URL}/nowhere", nn.Linear(2, 2))
    with pytest.raises(InvalidOption, match=r"storage_options for 'memory://.*' cannot be used"):
        foreign_weights.load(url, nn.Linear(2, 2), storage_options={1: 2})
    store.pipe(f"{url}/model.safetensors", store.cat(f"{url}/model.safetensors")[:-4])
    with pytest.raises(CheckpointCorrupted, match=f"'{url}/model.safetensors' is no intact safetensors file"):
        foreign_weights.load(url, nn.Linear(2, 2))
