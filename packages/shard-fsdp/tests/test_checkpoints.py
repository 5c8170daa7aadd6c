"""Checkpoints of copies and shards: written once, whole on request, and the same bits elsewhere."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from shard_core import get_strategy
from shard_core.testing import models, set_up, step, whole_weights

State = dict[str, torch.Tensor]


def whole_state(strategy: Any, model: Any, optimizer: Any) -> State:
    """Collect weights and optimizer state, flat by name, on rank 0."""
    slots = strategy.optimizer_state_dict(optimizer).get("state", {})
    return whole_weights(strategy, model) | {
        f"{name}.{slot}": torch.as_tensor(value).clone() for name, held in slots.items() for slot, value in held.items()
    }


def save(path: Path, options: dict[str, Any]) -> State:
    with get_strategy("hsdp", **options) as strategy:
        model, optimizer = set_up(strategy, "uneven", "adamw")
        for batch in models.batches("uneven", 2, 12):
            step(strategy, model, optimizer, batch)
        strategy.save_checkpoint(path, {"model": model, "optimizer": optimizer})
        return whole_state(strategy, model, optimizer)


def load(path: Path, name: str, options: dict[str, Any]) -> State:
    with get_strategy(name, **options) as strategy:
        model, optimizer = set_up(strategy, "uneven", "adamw", seed=1)
        strategy.load_checkpoint(path, {"model": model, "optimizer": optimizer})
        return whole_state(strategy, model, optimizer)


def written(path: Path) -> dict[str, list[list[int]]]:
    """List the shapes of what stands in a checkpoint's files, by name."""
    shapes: dict[str, list[list[int]]] = {}
    for file in path.rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 - not a dict
                shapes.setdefault(key.partition("[")[0], []).append(tensors.get_slice(key).get_shape())
    return shapes


@pytest.mark.parametrize(("size", "mesh"), [(2, (2, 1)), pytest.param(4, (2, 2), marks=pytest.mark.long)])
def test_copies_are_written_once_and_come_back_bit_for_bit(
    worlds: Any, tmp_path: Path, size: int, mesh: tuple[int, int]
) -> None:
    saved = worlds(size).run(save, tmp_path / "c", {"device_mesh": mesh})[0]
    tensors = {
        name: shapes for name, shapes in written(tmp_path / "c").items() if name.startswith(("model.", "optim."))
    }
    elements = sum(math.prod(shape) for shapes in tensors.values() for shape in shapes)
    assert elements == sum(tensor.numel() for name, tensor in saved.items() if not name.endswith(".step"))
    for ranks, name, options in (1, "single", {}), (2, "fsdp_cpu_offload", {}), (size, "hsdp", {"device_mesh": mesh}):
        loaded = worlds(ranks).run(load, tmp_path / "c", name, options)[0]
        assert loaded.keys() == saved.keys()
        for key, tensor in saved.items():
            assert torch.equal(loaded[key], tensor), key


def test_state_dict_type_is_the_form_of_checkpoints(worlds: Any, tmp_path: Path) -> None:
    for form, pieces in ("sharded", 2), ("full", 1):
        worlds(2).run(save, tmp_path / form, {"state_dict_type": form})
        assert len(written(tmp_path / form)["model.first.weight"]) == pieces
