"""The folder of a run, over ranks and strategies: its newest checkpoint, the last few, and what two differ in."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from resumed_run import Leg, go_under

from shard_core import get_strategy
from shard_core.checkpoint.inspection.compare import compare
from shard_core.checkpoint.retention.policy import Retention
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO

STRATEGIES = ("ddp", "fsdp")


def find_from(strategy_name: str, folders: list[Path]) -> tuple[Path | None, Path | None]:
    """Find a run under one name, each rank where it sees another folder by it."""
    with get_strategy(strategy_name) as strategy:
        before = Path.cwd()
        os.chdir(folders[strategy.global_rank])
        try:
            return strategy.latest_checkpoint("run"), strategy.latest_checkpoint("nowhere")
        finally:
            os.chdir(before)


def save(strategy_name: str, run: Path, steps: list[int], retention: Retention | None = None) -> None:
    with get_strategy(strategy_name, checkpoint_io=ShardedCheckpointIO(retention=retention)) as strategy:
        for step in steps:
            strategy.save_checkpoint(run / f"step-{step}", {"step": step})


def refuse(strategy_name: str, folder: str) -> str:
    with get_strategy(strategy_name) as strategy, pytest.raises(Exception, match="does not know") as caught:
        strategy.latest_checkpoint(folder)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_resume_from_what_rank_0_sees(worlds: Any, tmp_path: Path, strategy: str) -> None:
    folders = [tmp_path / "rank-0", tmp_path / "rank-1"]
    worlds(1).run(save, "single", folders[0] / "run", [1, 2])
    time.sleep(0.01)
    worlds(1).run(save, "single", folders[1] / "run", [3])  # newer, but rank 0 does not see it
    assert worlds(2).run(find_from, strategy, folders) == [(Path("run/step-2"), None)] * 2
    assert worlds(2).run(find_from, strategy, folders[::-1]) == [(Path("run/step-3"), None)] * 2


def test_what_rank_0_cannot_look_at_is_an_error_on_every_rank(worlds: Any) -> None:
    messages = worlds(2).run(refuse, "ddp", "memori://run")
    sentence = "'memori://run' is of a kind that fsspec does not know; did you mean 'memory'?"
    assert all(each.startswith("InvalidOption") and each.endswith(f"rank 0: {sentence}") for each in messages)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_saves_on_two_ranks_leave_the_last_few(worlds: Any, tmp_path: Path, strategy: str) -> None:
    worlds(2).run(save, strategy, tmp_path / "run", [1, 2, 3, 4, 5, 6], Retention(keep_last=2, keep_every=3))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["step-3", "step-5", "step-6"]


def test_strategy_form_and_number_of_ranks_are_no_differences(worlds: Any, tmp_path: Path) -> None:
    """One training state, carried through strategies without a step, is the same in each of its checkpoints."""
    worlds(2).run(go_under, "fsdp", {}, Leg(save=tmp_path / "0"))
    carried = [("ddp", 2, None), ("fsdp", 3, "full"), ("single", 1, None), ("fsdp", 2, None)]
    for number, (strategy, size, form) in enumerate(carried, 1):
        leg = Leg(seed=number, load=tmp_path / str(number - 1), save=tmp_path / str(number), steps=0, form=form)
        worlds(size).run(go_under, strategy, {}, leg)
        comparison = compare(tmp_path / "0", tmp_path / str(number))
        assert comparison.differences == ()
        assert comparison.tensors > 20
    worlds(2).run(go_under, "fsdp", {}, Leg(load=tmp_path / "0", save=tmp_path / "further", steps=1))
    assert {each.kind for each in compare(tmp_path / "0", tmp_path / "further").differences} >= {"elements", "value"}


def test_the_command_needs_nothing_that_wrote_the_checkpoint(worlds: Any, tmp_path: Path) -> None:
    worlds(2).run(go_under, "fsdp", {}, Leg(save=tmp_path / "a"))
    program = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0].startswith("shard_") and not name.startswith("shard_core"):
            raise ImportError(f"{name} must not be needed")
sys.meta_path.insert(0, Refuse())
from shard_core.cli.main import main
path, out = sys.argv[1:]
for words in (["inspect", path], ["verify", path], ["compare", path, path], ["export", path, out]):
    main(["checkpoint", *words], standalone_mode=False)
import torch.distributed
assert not torch.distributed.is_initialized()
"""
    command = [sys.executable, "-c", program, str(tmp_path / "a"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "by fsdp on 2 ranks" in " ".join(done.stdout.split())
