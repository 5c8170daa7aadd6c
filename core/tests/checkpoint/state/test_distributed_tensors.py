"""DTensors on real process groups: FSDP2, replicas and tensor parallelism load what the others saved."""

from __future__ import annotations

import contextlib
import resource

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import CheckpointError


class Model(nn.Module):
    """Sizes that no number of ranks divides, a tie, a frozen layer, one dim too small for all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Linear(7, 5, bias=False)
        self.middle = nn.Linear(7, 7)
        self.frozen = nn.Linear(7, 7).requires_grad_(False)
        self.head = nn.Linear(7, 1)
        self.register_buffer("count", torch.tensor(3))
        self.tied = nn.Linear(7, 5, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.middle(x).relu())
        return self.head(hidden).sum() + (self.embedding(x) * self.tied(hidden)).sum()


def _batch(step: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 21).view(3, 7) * (step + 1)


def _collectives() -> ProcessGroupCollectives:
    collectives = ProcessGroupCollectives()
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    collectives.connect(rank, world_size, torch.device("cpu"))
    return collectives


def _prepare(layout: str) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """Return the user's module, what is called, and an optimizer with two groups."""
    module = Model()
    called: nn.Module = module
    if layout == "fsdp":
        fully_shard(module.middle)
        fully_shard(module)
    elif layout == "ddp":
        called = DistributedDataParallel(module)
    elif layout == "columns":
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for layer in (module.middle, module.head):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(1)]))
    groups = [
        {"params": [p for n, p in module.named_parameters() if n.endswith("weight") and p.requires_grad], "lr": 0.01},
        {"params": [p for n, p in module.named_parameters() if n.endswith("bias") and p.requires_grad]},
    ]
    return module, called, torch.optim.AdamW(groups, lr=0.02, foreach=layout != "columns")


def _train(called: nn.Module, optimizer: torch.optim.Optimizer, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        loss = called(_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _state(module: nn.Module, optimizer: torch.optim.Optimizer, collectives: ProcessGroupCollectives) -> TensorState:
    return TensorState(
        {"model": module}, {"optimizer": optimizer}, rank=collectives.rank, world_size=collectives.world_size
    )


def _full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).clone()


def _everything(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    found: dict[str, object] = {name: _full(value) for name, value in module.state_dict().items()}
    for name, parameter in module.named_parameters():
        found |= {f"{name}:{slot}": _full(value) for slot, value in optimizer.state.get(parameter, {}).items()}
    return found


def train_and_save(layout: str, path: str, form: str) -> dict[str, object]:
    collectives = _collectives()
    module, called, optimizer = _prepare(layout)
    _train(called, optimizer, 0, 2)
    ShardedCheckpointIO().save(
        path, _state(module, optimizer, collectives), {}, coordinator=collectives, information={}, state_dict_type=form
    )
    return _everything(module, optimizer)


def load_and_go_on(layout: str, path: str) -> tuple[dict[str, object], list[float]]:
    collectives = _collectives()
    module, called, optimizer = _prepare(layout)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for group in optimizer.param_groups:
        group["lr"], group["betas"] = 9.0, (0.1, 0.1)
    ShardedCheckpointIO().load(path, _state(module, optimizer, collectives), coordinator=collectives)
    found = _everything(module, optimizer)
    return found, _train(called, optimizer, 2, 4) if layout != "columns" else []


@pytest.mark.parametrize(
    ("saved", "ranks", "form", "loads"),
    [
        ("fsdp", 2, "sharded", [("ddp", 3), ("single", 1), ("columns", 2), ("fsdp", 3)]),
        ("ddp", 3, "full", [("fsdp", 2)]),
        ("fsdp", 3, "full", [("single", 1), ("columns", 3)]),
    ],
)
def test_every_layout_goes_on_from_every_other(worlds, tmp_path, saved, ranks, form, loads):
    path = str(tmp_path / "checkpoint")
    wanted = worlds(ranks).run(train_and_save, saved, path, form)[0]
    module, _, optimizer = _prepare("single")
    uninterrupted = _train(module, optimizer, 0, 4)[2:]
    for layout, world_size in loads:
        for found, losses in worlds(world_size).run(load_and_go_on, layout, path):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            if losses:
                torch.testing.assert_close(losses, uninterrupted, rtol=1e-5, atol=0)


def save_with_one_disk_full(path: str) -> tuple[str, float]:
    collectives = _collectives()
    module, called, optimizer = _prepare("fsdp")
    _train(called, optimizer, 0, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if collectives.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
    message = "nothing was raised"
    with contextlib.suppress(CheckpointError):
        try:
            ShardedCheckpointIO().save(
                path, _state(module, optimizer, collectives), {}, coordinator=collectives, information={}
            )
        except CheckpointError as error:
            message = str(error)
            raise
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return message, _train(called, optimizer, 2, 3)[0]


def test_a_disk_that_is_full_on_one_rank_fails_all_and_training_goes_on(worlds, tmp_path):
    path = tmp_path / "checkpoint"
    wanted = worlds(2).run(train_and_save, "fsdp", str(path), "sharded")[0]
    before = {each.name for each in path.iterdir()}
    for message, loss in worlds(2).run(save_with_one_disk_full, str(path)):
        assert "failed on 1 of 2 ranks: rank 1: OSError: [Errno 27] File too large" in message
        assert loss == loss
    assert {each.name for each in path.iterdir()} == before
    found = worlds(2).run(load_and_go_on, "fsdp", str(path))[0][0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def refuse_pending_sums_and_unknown_meshes() -> list[str]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("rows", "columns"))
    messages = []
    for tensor in (
        DTensor.from_local(torch.ones(2), mesh["columns"], [Partial()]),
        DTensor.from_local(torch.ones(2), mesh["rows"], [Replicate()]),
    ):
        module = nn.Module()
        module.register_buffer("tensor", tensor)
        state = TensorState({"model": module}, {}, rank=torch.distributed.get_rank(), world_size=2)
        try:
            state.shards()
        except CheckpointError as error:
            messages.append(str(error))
    return messages


def test_layouts_that_are_no_values_or_not_known_are_refused(worlds):
    for messages in worlds(2).run(refuse_pending_sums_and_unknown_meshes):
        assert "which is a pending sum, not a value" in messages[0]
        assert "lives on a mesh of 1 of 2 ranks; say on which mesh all ranks stand" in messages[1]
