"""Optimizer state that is not shaped like its parameter: a number per row and per column, as Adafactor keeps it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.bits import assert_same_bits
from fixtures.single_rank import load, save
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import CheckpointError


class RowsAndColumns(torch.optim.Optimizer):
    """Scales a matrix's gradient by running means over its rows and its columns; works on DTensors, as torch's do."""

    def __init__(self, params: Any, lr: float, *, local: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self._local = local

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                square = parameter.grad.square()
                if self._local and isinstance(square, DTensor):
                    self.state[parameter]["rows"] = square.to_local().mean(1)
                    continue
                if not self.state[parameter]:
                    self.state[parameter] = {"rows": torch.zeros_like(square.mean(1, keepdim=True))}
                    self.state[parameter]["columns"] = _whole(square.mean(0, keepdim=True)) * 0
                slots = self.state[parameter]
                slots["rows"].lerp_(square.mean(1, keepdim=True), 0.5)
                slots["columns"].lerp_(_whole(square.mean(0, keepdim=True)), 0.5)
                scale = slots["rows"].sqrt() + slots["columns"].sqrt() + 1e-3
                parameter.sub_(group["lr"] * parameter.grad / scale)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Reduce pending sums."""
    return tensor.redistribute(placements=[Replicate()]) if isinstance(tensor, DTensor) else tensor


def _made(sharded: bool, *, local: bool = False) -> tuple[nn.Module, RowsAndColumns]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 4, bias=False))
    if sharded:
        fully_shard(module)
    return module, RowsAndColumns(module.parameters(), 0.1, local=local)


def _train(module: nn.Module, optimizer: RowsAndColumns, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = module(torch.linspace(-1, 1, 21).view(3, 7) * (step + 1)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _slots(module: nn.Module, optimizer: RowsAndColumns) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{slot}": (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, parameter in module.named_parameters()
        for slot, value in optimizer.state[parameter].items()
    }


def _state(module: nn.Module, optimizer: RowsAndColumns) -> tuple[TensorState, ProcessGroupCollectives]:
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    collectives = ProcessGroupCollectives()
    collectives.connect(rank, world_size, torch.device("cpu"))
    return TensorState({"model": module}, {"optimizer": optimizer}, rank=rank, world_size=world_size), collectives


def save_sharded(path: str) -> dict[str, torch.Tensor]:
    module, optimizer = _made(sharded=True)
    _train(module, optimizer, 0, 2)
    state, collectives = _state(module, optimizer)
    ShardedCheckpointIO().save(path, state, {}, coordinator=collectives, information={})
    return _slots(module, optimizer)


def load_sharded(path: str, steps_before: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    module, optimizer = _made(sharded=True)
    _train(module, optimizer, 0, steps_before)
    state, collectives = _state(module, optimizer)
    ShardedCheckpointIO().load(path, state, coordinator=collectives)
    return _slots(module, optimizer), _train(module, optimizer, 2, 4)


def save_local(path: str) -> str:
    module, optimizer = _made(sharded=True, local=True)
    _train(module, optimizer, 0, 1)
    state, collectives = _state(module, optimizer)
    try:
        ShardedCheckpointIO().save(path, state, {}, coordinator=collectives, information={})
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def uninterrupted():
    module, optimizer = _made(sharded=False)
    return _train(module, optimizer, 0, 4)


def _load_alone(path) -> tuple[dict[str, torch.Tensor], list[float]]:
    module, optimizer = _made(sharded=False)
    load(path, module, optimizer)
    return _slots(module, optimizer), _train(module, optimizer, 2, 4)


def test_statistics_of_rows_and_columns_go_from_any_layout_to_any_other(worlds, tmp_path, uninterrupted):
    saved = worlds(2).run(save_sharded, str(tmp_path / "sharded"))[0]
    assert {tuple(value.shape) for value in saved.values()} == {(5, 1), (1, 7), (4, 1), (1, 5)}
    module, optimizer = _made(sharded=False)
    _train(module, optimizer, 0, 2)
    save(tmp_path / "alone", module, optimizer)
    for path, wanted in ((tmp_path / "sharded", saved), (tmp_path / "alone", _slots(module, optimizer))):
        answers = [_load_alone(path)]
        for steps_before in (0, 1):
            answers += worlds(2).run(load_sharded, str(path), steps_before)
        for found, losses in answers:
            assert_same_bits(found, wanted)
            torch.testing.assert_close(losses, uninterrupted[2:], rtol=1e-5, atol=0)


def test_state_that_may_be_a_part_or_a_copy_is_refused_by_name(worlds, tmp_path):
    for message in worlds(2).run(save_local, str(tmp_path / "checkpoint")):
        assert "optimizer 'optimizer' keeps 'rows' of '0.weight' as a plain tensor" in message
    assert not (tmp_path / "checkpoint").exists()
