"""The boxes each rank of a mesh of any size holds, found in one forked process per rank without communication.

Usage: simulated_mesh.py ROWSxCOLUMNS...; prints a list of [rank, key, shape, offsets, sizes, write] for each mesh.
"""

from __future__ import annotations

import json
import os
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# Nothing public pretends to be a group: torch's own tests of layouts use this one.
from torch.testing._internal.distributed.fake_pg import FakeStore

from shard_core.checkpoint.tensor_state import TensorState


def boxes(rank: int, rows: int, columns: int) -> list[object]:
    """Describe one rank of FSDP2 over rows and tensor parallelism over columns."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=rows * columns, store=FakeStore())
    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("rows", "columns"))
    module = nn.Module()
    for name, shape, placement in (
        ("rowwise", (33, 5), Shard(0)),
        ("columnwise", (5, 7), Shard(1)),
        ("copied", (9,), Replicate()),
        ("also_copied", (9,), Replicate()),
        ("deep", (2, 3, 4), Shard(2)),
    ):
        tensor = distribute_tensor(torch.zeros(shape), mesh["columns"], [placement])
        module.register_parameter(name, nn.Parameter(tensor))
    module.register_buffer("plain", torch.zeros(3))
    for name, placements in (("twice", [Shard(0), Shard(0)]), ("crossed", [Shard(1), Replicate()])):
        module.register_buffer(name, distribute_tensor(torch.zeros(3, 5), mesh, placements))
    fully_shard(module, mesh=mesh["rows"])
    state = TensorState({"model": module}, {}, rank=rank, world_size=rows * columns, mesh=mesh)
    return [[rank, s.key, s.shape, s.offsets, tuple(s.view.shape), s.write] for s in state.shards()]


def mesh_boxes(rows: int, columns: int) -> list[object]:
    """Ask one child per rank."""
    found: list[object] = []
    for rank in range(rows * columns):
        reader, writer = os.pipe()
        if os.fork() == 0:
            with os.fdopen(writer, "w") as pipe:
                json.dump(boxes(rank, rows, columns), pipe)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            found += json.load(pipe)
        os.wait()
    return found


if __name__ == "__main__":
    print(json.dumps([mesh_boxes(*map(int, word.split("x"))) for word in sys.argv[1:]]))
