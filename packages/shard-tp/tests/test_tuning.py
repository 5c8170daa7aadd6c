"""What is worth trying."""

from typing import Any

from torch import nn

from shard_core import get_strategy


def blocks() -> nn.Module:
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(8)])


def test_groups_come_first_and_units_where_there_are_several() -> None:
    proposals = get_strategy("tp").engine_worth_trying(blocks(), 4)
    assert next(proposals) == [{"tensor_parallel_size": 1}, {"tensor_parallel_size": 2}]
    layouts = proposals.send({"tensor_parallel_size": 2})
    assert {"tensor_parallel_size": 2, "unit_bytes": 1, "reshard_after_forward": False} in layouts
    for setting in layouts:
        get_strategy("tp", **setting)


def test_one_group_of_all_ranks_shards_nothing() -> None:
    proposals = get_strategy("tp").engine_worth_trying(blocks(), 4)
    next(proposals)
    assert _rest(proposals, {}) == []


def test_sizes_the_user_has_chosen_are_kept() -> None:
    proposals = get_strategy("tp", data_parallel_size=2).engine_worth_trying(blocks(), 4)
    assert next(proposals) == []
    assert {"unit_bytes": 1} in proposals.send({})


def _rest(proposals: Any, best: dict[str, Any]) -> list[Any]:
    try:
        return [proposals.send(best)]
    except StopIteration:
        return []
