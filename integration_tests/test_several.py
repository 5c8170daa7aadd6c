"""Several strategies live side by side in one process."""

from typing import Any

from shard_core import get_strategy


def one_after_another() -> list[int]:
    """Two strategies at once, then a third after both."""
    sums = []
    with get_strategy("ddp") as first, get_strategy("fsdp") as second:
        sums += [int(strategy.all_reduce(1, reduce_op="sum")) for strategy in (first, second)]
    with get_strategy("fsdp") as third:
        sums.append(int(third.all_reduce(1, reduce_op="sum")))
    return sums


def test_strategies_do_not_share_state(worlds: Any) -> None:
    assert worlds(2).run(one_after_another) == [[2, 2, 2]] * 2
