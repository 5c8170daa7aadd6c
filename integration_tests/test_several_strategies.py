"""Several strategies live in one process, side by side and one after another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from environments import ROOT, SETTINGS, run, succeed

from shard_core import get_strategy

AFTER_ONE_ANOTHER = """\
import sys

import torch
from shard_core import get_strategy

for name in ("ddp", "fsdp", "fsdp", "ddp"):
    with get_strategy(name) as strategy:
        model = torch.nn.Linear(2, 2)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        strategy.backward(model(torch.ones(1, 2)).sum(), model)
        strategy.clip_gradients_norm(model, optimizer, 1.0)
        assert strategy.optimizer_step(optimizer)
        # One write per line: torchrun's ranks are unbuffered and share stdout, where print's pieces would mix.
        sys.stdout.write(f"{name}:{int(strategy.all_reduce(1, reduce_op='sum'))}\\n")
"""


def side_by_side() -> list[int]:
    """Run two strategies at once, then a third after both."""
    sums = []
    with get_strategy("ddp") as first, get_strategy("fsdp") as second:
        sums += [int(strategy.all_reduce(1, reduce_op="sum")) for strategy in (first, second)]
    with get_strategy("fsdp") as third:
        sums.append(int(third.all_reduce(1, reduce_op="sum")))
    return sums


def test_strategies_do_not_share_state(worlds: Any) -> None:
    assert worlds(2).run(side_by_side) == [[2, 2, 2]] * 2


def test_ranks_that_left_meet_again(tmp_path: Path) -> None:
    script = tmp_path / "after_one_another.py"
    script.write_text(AFTER_ONE_ANOTHER)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = succeed(run(ROOT, *torchrun, str(script), settings=SETTINGS, timeout=120))
    assert sorted(output.split()) == sorted(["ddp:2", "fsdp:2", "fsdp:2", "ddp:2"] * 2)
