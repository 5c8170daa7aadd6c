"""Weights as other libraries write them, and loading them without strategies."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from flat_state import FlatState, whole
from safetensors.torch import save_file
from single_rank import state_of
from thread_ranks import all_ranks

from shard_core.checkpoint.peers.loading import load_weights
from shard_core.errors import CheckpointCorrupted

Tensors = Mapping[str, torch.Tensor]


def write_file(path: Path, tensors: Tensors) -> Path:
    """Write one safetensors file."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def write_folder(path: Path, tensors: Tensors, files: int = 1) -> Path:
    """Write a folder in Hugging Face's layout: as many files, and an index if there are several."""
    path.mkdir(parents=True)
    if files == 1:
        write_file(path / "model.safetensors", tensors)
        return path
    named = [f"model-{place:05d}-of-{files:05d}.safetensors" for place in range(1, files + 1)]
    weight_map = {name: named[place % files] for place, name in enumerate(tensors)}
    for file in named:
        write_file(path / file, {name: tensors[name] for name, where in weight_map.items() if where == file})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def write_torch(path: Path, content: Any) -> Path:
    """Write a file of torch.save."""
    torch.save(content, path)
    return path


def write_distributed(path: Path, content: dict[str, Any]) -> Path:
    """Write a folder of torch.distributed.checkpoint, as one rank does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one rank only
        dcp.save(content, checkpoint_id=path, no_dist=True)
    return path


def load(path: Any, module: torch.nn.Module, **options: Any) -> tuple[str, ...]:
    """Load as a world of one."""
    return all_ranks(1, lambda coordinator: load_weights(path, state_of(module), coordinator=coordinator, **options))[0]


def load_flat(path: Any, like: Tensors, ranks: int, **options: Any) -> dict[str, torch.Tensor]:
    """Load into ranges of elements on several ranks, and put these together again."""

    def on_rank(coordinator: Any) -> FlatState:
        empty = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in like.items()}
        state = FlatState(empty, coordinator.rank, ranks)
        assert load_weights(path, state, coordinator=coordinator, **options) == ()
        return state

    states = all_ranks(ranks, on_rank)
    loaded = whole(states, {f"model.{name}": tensor.shape for name, tensor in like.items()})
    return {key.removeprefix("model."): tensor for key, tensor in loaded.items()}


def refused(path: Path, match: str, **options: Any) -> None:
    """Load into a layer, which must fail with this sentence and leave the layer as it was."""
    module = torch.nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(CheckpointCorrupted, match=match):
        load(path, module, **options)
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
