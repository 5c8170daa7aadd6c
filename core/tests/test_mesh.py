from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch

from shard_core.errors import InvalidOption
from shard_core.mesh import DATA_AXIS, MeshShape, arranged


def _build(axes):
    mesh = MeshShape(axes).build("cpu")
    return mesh.mesh_dim_names, tuple(mesh.shape), list(mesh.get_coordinate())


@pytest.mark.parametrize(
    ("axes", "world_size", "sizes"),
    [
        ({"data_parallel": 4}, 4, (4,)),
        ({"data_parallel": "auto"}, 1, (1,)),
        ({"data_parallel": "auto", "tensor_parallel": 2}, 6, (3, 2)),
        ({"replicate": 2, "shard": "auto"}, 2, (2, 1)),
        ({"a": 2, "b": 3, "c": "auto"}, 24, (2, 3, 4)),
    ],
)
def test_open_axes_are_filled(axes, world_size, sizes):
    shape = MeshShape(axes).fitted(world_size)
    assert tuple(shape.size(name) for name in axes) == sizes
    assert shape.names == tuple(axes)
    assert shape.fitted(world_size) == shape


@pytest.mark.parametrize(
    ("axes", "world_size", "message"),
    [
        ({"a": 2, "b": 2}, 6, "needs 4 ranks, but there are 6; a=3 or b=3 would fit"),
        ({"a": 4, "b": 3}, 6, r"needs 12 ranks, but there are 6; a=2 would fit"),
        ({"a": 3, "b": 3}, 4, "needs 9 ranks, but there are 4; start a multiple of 9 ranks"),
        ({"a": 2}, 1, "needs 2 ranks, but there is 1; a=1 would fit"),
        ({"a": 1}, 2, "needs 1 rank, but there are 2; a=2 would fit"),
        ({"a": "auto", "b": 4}, 6, "needs a multiple of 4 ranks, but there are 6; b=6 would fit"),
    ],
)
def test_a_shape_that_does_not_fit_says_what_would(axes, world_size, message):
    with pytest.raises(InvalidOption, match=message):
        MeshShape(axes).fitted(world_size)


@pytest.mark.parametrize("size", [0, -1, 1.5, "2", True, None])
def test_sizes_are_positive_numbers(size):
    with pytest.raises(InvalidOption, match="mesh axis 'data_parallel' has size"):
        MeshShape({DATA_AXIS: size})


def test_two_open_axes_and_none_at_all_are_refused():
    with pytest.raises(InvalidOption, match="'a' and 'b' are both 'auto'"):
        MeshShape({"a": "auto", "b": "auto"})
    with pytest.raises(InvalidOption, match="at least one axis"):
        MeshShape({})


def test_an_unknown_axis_gets_the_nearest():
    with pytest.raises(InvalidOption, match="no axis 'tensor_paralel'; did you mean 'tensor_parallel'"):
        MeshShape({DATA_AXIS: 2, "tensor_parallel": 2}).size("tensor_paralel")


def test_a_shape_does_not_follow_the_dict_it_was_made_of():
    axes = {DATA_AXIS: 2}
    shape = MeshShape(axes)
    axes[DATA_AXIS] = 3
    assert shape.size(DATA_AXIS) == 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_ranks_stand_along_the_axes_in_order(worlds, world_size):
    results = worlds(world_size).run(_build, {DATA_AXIS: "auto", "tensor_parallel": 1})
    assert results == [((DATA_AXIS, "tensor_parallel"), (world_size, 1), [r, 0]) for r in range(world_size)]


def test_shapes_need_no_torch():
    program = "import sys, shard_core.mesh as m; m.MeshShape({'a': 'auto'}).fitted(4); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def _groups():
    ranks = torch.arange(2).view(1, 2)
    waits = (timedelta(seconds=60), timedelta(seconds=60), timedelta(seconds=90))
    meshes = [arranged(ranks, names, "cpu", wait) for names, wait in zip(("ab", "cd", "ab"), waits, strict=True)]
    return [id(group) for mesh in meshes for group in mesh.get_all_groups()]


def test_a_group_serves_all_meshes_that_have_its_ranks_in_line(worlds):
    for alone, together, alone_again, together_again, *longer in worlds(2).run(_groups):
        assert (alone, together) == (alone_again, together_again)
        assert not {alone, together} & set(longer)
