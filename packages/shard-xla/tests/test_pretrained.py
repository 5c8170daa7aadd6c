"""``save_pretrained``, where shards are split by elements or parameters live on an XLA device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from xla_environments import HASTY, spread_over

from shard_core import get_strategy


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))

    def save_pretrained(self, folder: Path, is_main_process: bool = True) -> None:
        if is_main_process:
            folder.mkdir()
            save_file(self.state_dict(), folder / "model.safetensors")


def save(name: str, folder: Path) -> dict[str, torch.Tensor]:
    with get_strategy(name, accelerator="xla") as strategy:
        model = strategy.setup_module(Model())
        strategy.unwrap(model).save_pretrained(folder)
        return {key: tensor.clone() for key, tensor in strategy.full_parameters(model)}


@pytest.mark.parametrize(("name", "ranks", "environment"), [("xla_fsdp", 2, HASTY), ("xla_spmd", 1, spread_over(2))])
def test_save_pretrained_writes_whole_tensors_by_the_users_names(
    worlds: Any, tmp_path: Path, name: str, ranks: int, environment: dict[str, str]
) -> None:
    weights = worlds(ranks, environment).run(save, name, tmp_path / "m", timeout=240)[0]
    torch.testing.assert_close(load_file(tmp_path / "m" / "model.safetensors"), weights, rtol=0, atol=0)
