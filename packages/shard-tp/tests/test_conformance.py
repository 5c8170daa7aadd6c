"""``tp`` keeps every promise of the contract, on every shape of mesh."""

import pytest
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from shard_core.testing import Conformance

PAIRS = (("expand", "contract"), ("first", "second"), ("0", "1"), ("2", "3"))


def split_pairs(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split each pair of layers of the kit's models whose width divides and that nothing stands between."""
    plan: dict[str, ParallelStyle] = {}
    for prefix, owner in model.named_modules():
        for column, row in PAIRS:
            first, second = getattr(owner, column, None), getattr(owner, row, None)
            if not isinstance(first, nn.Linear) or not isinstance(second, nn.Linear) or hasattr(owner, "scale"):
                continue
            if first.out_features == second.in_features and first.out_features % mesh.size() == 0:
                dot = f"{prefix}." if prefix else ""
                plan |= {f"{dot}{column}": ColwiseParallel(), f"{dot}{row}": RowwiseParallel()}
    parallelize_module(model, mesh, plan)


class TestTensorParallel(Conformance):
    """On two ranks the mesh is 1x2, on four 2x2."""

    strategy = "tp"
    options = {"tensor_parallel_size": 2, "parallelize_fn": split_pairs}
    world_sizes = (2, 4)


@pytest.mark.long
class TestDataParallel(Conformance):
    """A mesh of 2x1: nothing is split, and what is left is what ``fsdp`` is made of, held to the same promises."""

    strategy = "tp"
    options = {"tensor_parallel_size": 1}
    world_sizes = (2,)
