"""The norm is that of all gradients as one vector, however they are laid out."""

import gc
import math
import types
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.collectives.single import SingleCollectives
from shard_core.errors import InvalidOption
from shard_core.gradients import (
    LocalGradient,
    all_finite,
    clip_norm,
    clip_values,
    inside_objects,
    local_gradients,
    scale,
    total_norm,
)

SHAPES = [(4, 3), (7,), (1, 5), (2, 2, 2)]
NORMS = [1.0, 2.0, 3.0, math.inf]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    made = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    for parameter in made:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return made


def expected_norm(norm_type: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(parameters(), math.inf, norm_type)


@pytest.mark.parametrize("norm_type", NORMS)
def test_norm_of_whole_gradients_is_torchs(norm_type: float) -> None:
    norm = total_norm(local_gradients(parameters()), norm_type, SingleCollectives())
    assert torch.equal(norm, expected_norm(norm_type))


def sharded(placements: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> list[nn.Parameter]:
    """The same gradients, each laid out by the placements: a dim to shard for each axis, or -1 to replicate."""
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    made = []
    for parameter, dims in zip(parameters(), placements, strict=True):
        kinds = [Replicate() if dim < 0 else Shard(dim) for dim in dims]
        layout = nn.Parameter(distribute_tensor(parameter.detach(), mesh, kinds))
        assert parameter.grad is not None
        layout.grad = distribute_tensor(parameter.grad, mesh, kinds)
        made.append(layout)
    return made


def norms_of_sharded(placements: tuple[tuple[int, ...], ...], sizes: tuple[int, ...], clip: float) -> Any:
    collectives = ProcessGroupCollectives()
    layout = sharded(placements, sizes)
    gradients = local_gradients(layout)
    norms = [total_norm(gradients, norm_type, collectives).item() for norm_type in NORMS]
    clip_norm(gradients, clip, total_norm(gradients, 2.0, collectives))
    return norms, [p.grad.full_tensor() for p in layout]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("placements", "sizes"),
    [
        (((0,), (0,), (0,), (0,)), (2,)),  # the third has fewer rows than there are ranks
        (((0,), (0,), (0,), (0,)), (3,)),
        (((-1,), (-1,), (-1,), (-1,)), (2,)),  # replicas count once
        (((0,), (-1,), (1,), (-1,)), (2,)),  # several layouts at once
        (((0, 1), (0, -1), (-1, 1), (-1, -1)), (2, 2)),
    ],
)
def test_norm_and_clipping_of_shards_are_those_of_the_whole(worlds: Any, placements: Any, sizes: Any) -> None:
    whole = parameters()
    torch.nn.utils.clip_grad_norm_(whole, 0.5)
    results = worlds(math.prod(sizes)).run(norms_of_sharded, placements, sizes, 0.5)
    for norms, clipped in results:
        assert norms == results[0][0], "every rank gets the same norm"
        for norm, norm_type in zip(norms, NORMS, strict=True):
            assert norm == pytest.approx(expected_norm(norm_type).item(), rel=1e-6)
        for mine, parameter in zip(clipped, whole, strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-6, atol=0)


def norms_of_one_nan(rank_of_nan: int) -> list[float]:
    collectives = ProcessGroupCollectives()
    part = torch.full((2,), math.nan if collectives.rank == rank_of_nan else 1.0)
    gradients = [LocalGradient(part, (dist.group.WORLD,))]
    return [total_norm(gradients, norm_type, collectives).item() for norm_type in NORMS]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_norm_of_shards_is_nan_where_one_rank_has_one(worlds: Any, rank: int) -> None:
    for norms in worlds(2).run(norms_of_one_nan, rank):
        assert all(map(math.isnan, norms))


def test_a_norm_over_two_devices_is_on_the_first() -> None:
    # Offloaded shards are in host memory, and what is not sharded is on the device; "meta" stands for one here.
    on_device, offloaded = torch.ones(2, device="meta"), torch.ones(2)
    parts = [LocalGradient(on_device), LocalGradient(offloaded, (object(),))]
    assert total_norm(parts, 2.0, SingleCollectives()).device == on_device.device


def test_without_gradients_the_norm_is_zero() -> None:
    assert total_norm(local_gradients([nn.Parameter(torch.ones(2))]), 2.0, SingleCollectives()) == 0
    clip_norm([], 1.0, torch.zeros(()))


def test_an_empty_shard_has_norm_zero() -> None:
    empty = LocalGradient(torch.empty(0, 3))
    assert [total_norm([empty], kind, SingleCollectives()).item() for kind in NORMS] == [0.0] * 4
    assert all_finite([empty])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_element_is_found(value: float) -> None:
    gradients = local_gradients(parameters())
    assert all_finite(gradients)
    gradients[1].tensor[3] = value
    assert not all_finite(gradients)
    assert not total_norm(gradients, 2.0, SingleCollectives()).isfinite()


def test_scaling_and_clamping_work_in_place() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, -4.0, 0.5])
    gradients = local_gradients([parameter])
    scale(gradients, 2.0)
    clip_values(gradients, 1.5)
    assert parameter.grad.tolist() == [1.5, -1.5, 1.0]


def test_tensors_found_inside_objects_are_freed_with_them() -> None:
    tensor = torch.ones(2, requires_grad=True) * 2
    freed = weakref.ref(tensor)
    gc.disable()
    try:
        assert len(inside_objects(types.SimpleNamespace(loss=tensor))) == 1
        del tensor
        assert freed() is None, "held until garbage is collected, and with it all that it was computed from"
    finally:
        gc.enable()


def test_a_norm_that_counts_is_refused_of_shards_alone() -> None:
    gradients = [torch.ones(3), torch.zeros(2), torch.ones(1)]
    whole = [LocalGradient(each) for each in gradients]
    assert total_norm(whole, 0.0, SingleCollectives()) == torch.nn.utils.get_total_norm(gradients, 0.0) == 2
    group = object()
    with pytest.raises(InvalidOption, match="norm_type=0 counts"):
        total_norm([LocalGradient(each, (group,)) for each in gradients], 0.0, SingleCollectives())
