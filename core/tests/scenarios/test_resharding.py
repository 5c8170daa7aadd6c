"""Random tensors in random layouts, saved at one number of ranks and loaded at another, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from fixtures.bits import assert_same_bits, random_bits
from fixtures.flat_state import FlatState, whole
from fixtures.thread_ranks import all_ranks

from shard_core.checkpoint.format.chunk_index import BLOCK_BYTES
from shard_core.checkpoint.format.dtypes import ITEM_SIZES, torch_dtype
from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO


def _save(path, tensors, world_size, unit=1, form=None):
    def save(coordinator):
        state = FlatState(tensors, coordinator.rank, world_size, unit)
        ShardedCheckpointIO().save(path, state, {}, coordinator=coordinator, information={}, state_dict_type=form)

    all_ranks(world_size, save)


def _load(path, tensors, world_size, unit=1):
    blank = {key: torch.zeros_like(tensor) for key, tensor in tensors.items()}

    def load(coordinator):
        state = FlatState(blank, coordinator.rank, world_size, unit)
        ShardedCheckpointIO().load(path, state, coordinator=coordinator)
        return state

    return whole(all_ranks(world_size, load), {key: tensor.shape for key, tensor in tensors.items()})


@pytest.mark.parametrize("form", ["sharded", "full"])
@pytest.mark.parametrize("seed", range(6))
def test_any_layout_loads_into_any_other(tmp_path, seed, form):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    dtypes = [torch_dtype(code) for code in ITEM_SIZES]
    tensors = {
        f"model.{number}": random_bits(
            tuple(choose.choice([1, 2, 3, 5, 8]) for _ in range(choose.randint(0, 4))), dtype, generator
        )
        for number, dtype in enumerate(dtypes)
    }
    tensors["model.empty"] = torch.empty(3, 0, 2)
    _save(tmp_path / "checkpoint", tensors, choose.randint(1, 4), choose.choice([1, 8]), form)
    assert verify(tmp_path / "checkpoint").is_fine
    for world_size in (1, 2, 3, 5):
        found = _load(tmp_path / "checkpoint", tensors, world_size, choose.choice([1, 4]))
        assert_same_bits(found, tensors)


def test_tensors_longer_than_a_block_have_a_digest_for_each(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.large": random_bits((BLOCK_BYTES // 64, 41), torch.int16, generator),
        "model.small": torch.ones(3),
    }
    _save(tmp_path / "checkpoint", tensors, 2)
    assert verify(tmp_path / "checkpoint").is_fine
    assert_same_bits(_load(tmp_path / "checkpoint", tensors, 3), tensors)


def test_other_readers_open_the_files(tmp_path):
    from safetensors import safe_open

    tensors = {"model.w": torch.arange(12.0).view(4, 3), "model.flags": torch.tensor([True, False, True])}
    _save(tmp_path / "checkpoint", tensors, 2)
    found = {}
    for rank in range(2):
        with safe_open(tmp_path / "checkpoint" / f"model-0000{rank}-of-00002.safetensors", "pt") as file:
            names = file.keys()
            found |= {name: file.get_tensor(name) for name in names}
    assert torch.equal(torch.cat([found["model.w[0:2,0:3]"], found["model.w[2:4,0:3]"]]), tensors["model.w"])
    _save(tmp_path / "full", tensors, 2, form="full")
    with safe_open(tmp_path / "full" / "checkpoint.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("model.w"), tensors["model.w"])
        assert torch.equal(file.get_tensor("model.flags"), tensors["model.flags"])
    assert sorted(path.name for path in (tmp_path / "full").iterdir()) == [
        "checkpoint.safetensors",
        "index.safetensors",
        "manifest.json",
    ]
