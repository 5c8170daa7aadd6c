"""Several strategies live in one process, side by side and one after another."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from environments import ROOT, SETTINGS, run, succeed

from shard_core import get_strategy

LONG = pytest.mark.long

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

#: Meshes over groups that are made anew, and equal those of strategies before.
NORMS = """\
import sys

import torch
from shard_core import get_strategy

for name, options in (("tp", {"plan": {}, "tensor_parallel_size": 1}), ("fsdp", {}), ("hsdp", {}), ("fsdp", {})):
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        model, (optimizer,) = strategy.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        with strategy.no_backward_sync(model):
            strategy.backward(model(torch.ones(2, 4)).square().mean(), model)
        strategy.backward(model(torch.ones(2, 4)).square().mean(), model)
        sys.stdout.write(f"{strategy.clip_gradients_norm(model, optimizer, 1.0).item()}\\n")
"""
#: Two strategies open, of which that leaves first which the ranks met for.
FIRST_LEAVES_FIRST = """\
import sys

import torch
from shard_core import get_strategy

first, second = get_strategy("ddp"), get_strategy(sys.argv[1])
first.setup_module(torch.nn.Linear(2, 2))
model = torch.nn.Linear(2, 2)
model, (optimizer,) = second.setup_module_and_optimizers(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
for leave in (first.teardown, lambda: None):
    second.backward(model(torch.ones(1, 2)).sum(), model)
    second.optimizer_step(optimizer)
    leave()
second.teardown()
sys.stdout.write(f"{torch.distributed.is_initialized()}\\n")
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


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


def test_no_strategy_computes_over_the_ranks_of_one_before(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(4, 4)
    for _ in range(2):
        plain(torch.ones(2, 4)).square().mean().backward()
    expected = torch.nn.utils.get_total_norm([each.grad for each in plain.parameters() if each.grad is not None])
    script = tmp_path / "norms.py"
    script.write_text(NORMS)
    output = succeed(run(ROOT, *TORCHRUN, str(script), settings=SETTINGS, timeout=120))
    assert [float(each) for each in output.split()] == [pytest.approx(expected.item())] * 8


@pytest.mark.parametrize("other", ["ddp", *(pytest.param(each, marks=LONG) for each in ("fsdp", "deepspeed_stage_2"))])
def test_the_process_group_stays_until_the_last_strategy_has_left(tmp_path: Path, other: str) -> None:
    script = tmp_path / "first_leaves_first.py"
    script.write_text(FIRST_LEAVES_FIRST)
    output = succeed(run(ROOT, *TORCHRUN, str(script), other, settings=SETTINGS, timeout=120))
    assert output.split() == ["False"] * 2


@LONG
def test_ranks_that_left_meet_again(tmp_path: Path) -> None:
    script = tmp_path / "after_one_another.py"
    script.write_text(AFTER_ONE_ANOTHER)
    output = succeed(run(ROOT, *TORCHRUN, str(script), settings=SETTINGS, timeout=120))
    assert sorted(output.split()) == sorted(["ddp:2", "fsdp:2", "fsdp:2", "ddp:2"] * 2)
