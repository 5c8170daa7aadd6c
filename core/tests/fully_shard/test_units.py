"""Units are formed by bytes, from whatever repeats, and never split what shares a parameter."""

import pytest
import torch
from torch import nn

from shard_core.fully_shard.units import find_units, with_chosen
from shard_core.preparation.submodules import num_bytes

WEIGHT = 10 * 10 * 4


def linear() -> nn.Linear:
    return nn.Linear(10, 10, bias=False)


def names(module: nn.Module, unit_bytes: int) -> list[tuple[str, ...]]:
    return [unit.names for unit in find_units(module, unit_bytes)]


@pytest.mark.parametrize(
    ("unit_bytes", "expected"),
    [
        (1, [("0",), ("1",), ("2",), ("3",), ("4",)]),
        (WEIGHT, [("0",), ("1",), ("2",), ("3",), ("4",)]),
        (WEIGHT + 1, [("0", "1"), ("2", "3"), ("4",)]),
        (2 * WEIGHT, [("0", "1"), ("2", "3"), ("4",)]),  # half a unit may stand alone
        (3 * WEIGHT, []),  # the whole weighs less than two units
        (10**12, []),
    ],
)
def test_neighbours_join_until_a_unit_weighs_enough(unit_bytes: int, expected: list[tuple[str, ...]]) -> None:
    assert names(nn.Sequential(*[linear() for _ in range(5)]), unit_bytes) == expected


def test_a_light_tail_joins_its_neighbour() -> None:
    model = nn.Sequential(*[linear() for _ in range(7)])
    assert names(model, 3 * WEIGHT) == [("0", "1", "2"), ("3", "4", "5", "6")]


def test_blocks_are_the_outermost_that_repeat() -> None:
    blocks = nn.ModuleList(nn.Sequential(linear(), linear()) for _ in range(3))
    model = nn.ModuleDict({"stem": linear(), "blocks": blocks})
    assert names(model, 1) == [("blocks.0",), ("blocks.1",), ("blocks.2",)]


def test_blocks_of_two_stacks_never_join_one_unit() -> None:
    model = nn.ModuleDict({side: nn.ModuleList(linear() for _ in range(2)) for side in ("encoder", "decoder")})
    assert names(model, 2 * WEIGHT) == [("encoder.0", "encoder.1"), ("decoder.0", "decoder.1")]


def test_what_is_tied_across_units_stays_with_the_root() -> None:
    model = nn.Sequential(*[linear() for _ in range(4)])
    model[3].weight = model[0].weight
    assert names(model, 1) == [("1",), ("2",)]


def test_a_block_that_runs_several_times_counts_once() -> None:
    block = linear()
    assert names(nn.Sequential(block, block, block), 1) == []
    assert num_bytes(nn.Sequential(block, block)) == WEIGHT


def test_children_without_parameters_are_passed_over() -> None:
    model = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), nn.LayerNorm(10))
    assert names(model, 1) == [("0",), ("2",)]


@pytest.mark.parametrize("module", [nn.ReLU(), nn.Linear(3, 3), nn.ModuleList()])
def test_nothing_repeats(module: nn.Module) -> None:
    assert find_units(module, 1) == []


def test_bytes_follow_the_dtype() -> None:
    assert num_bytes(linear().to(torch.bfloat16)) == WEIGHT // 2


def chosen(model: nn.Module, *modules: nn.Module) -> list[tuple[str, ...]]:
    return [unit.names for unit in with_chosen(model, modules, find_units(model, 2 * WEIGHT))]


def test_a_chosen_block_leaves_the_unit_of_its_neighbours() -> None:
    model = nn.Sequential(*[linear() for _ in range(4)])
    assert chosen(model, model[0]) == [("0",), ("1",), ("2", "3")]


def test_a_chosen_module_may_lie_inside_a_unit_or_around_one() -> None:
    model = nn.Sequential(*[nn.Sequential(linear(), nn.Sequential(linear())) for _ in range(4)])
    assert chosen(model, model[0][1]) == [("0.1",), ("0",), ("1",), ("2",), ("3",)]
    assert chosen(nn.Sequential(model), model) == [("0.0",), ("0.1",), ("0.2",), ("0.3",), ("0",)]


def test_a_tie_into_an_inner_unit_is_kept_by_the_unit_around_it() -> None:
    model = nn.Sequential(nn.Sequential(linear(), nn.Sequential(linear())), linear())
    model[0][1][0].weight = model[0][0].weight
    assert chosen(model, model[0], model[0][1]) == [("0",)]
    model[1].weight = model[0][0].weight
    assert chosen(model, model[0], model[0][1]) == []


def test_a_module_under_two_names_is_one_unit_where_both_lie_in_it() -> None:
    model = nn.Module()
    model.first, model.second = linear(), linear()
    model.both = nn.Sequential(model.first, model.second)
    assert chosen(model, model.first, model.both) == [("first",)], "second is the root's as well"


def test_a_module_in_two_units_is_parted_by_neither() -> None:
    inner = linear()
    model = nn.Sequential(nn.Sequential(linear(), inner), nn.Sequential(linear(), inner), linear())
    assert chosen(model, model[0], model[1]) == []
    assert chosen(model, model[0], model[1], inner) == [("0.1",), ("0",), ("1",)]
