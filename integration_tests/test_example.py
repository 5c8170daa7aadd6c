"""The example trains under every installed strategy, unchanged, and comes to the same."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from environments import ROOT, SETTINGS, python_with, run, succeed

from shard_core import plugins

EXAMPLE = ROOT / "docs" / "examples" / "train_gpt.py"
STEPS, MICRO_BATCHES = 3, 4
INSTALLED = [each for each in plugins.installed() if each.info is not None and not each.problem]
#: Whole copies; shards have test_single_file_gpt.py, and all others wait for the long run.
ALWAYS = ("single", "ddp")


@functools.cache
def trained(folder: Path, strategy: str, ranks: int, timeout: float = 240) -> dict[str, float]:
    text = folder / "text.py"
    text.write_text("def double(x):\n    return 2 * x\n\n\n" * 1000)
    python = str(python_with(strategy))
    command = (python, "-m", "shard_core", "run", "--strategy", strategy, "--nproc-per-node", str(ranks))
    size = ("--steps", str(STEPS), "--batch", "4", "--accumulate", str(MICRO_BATCHES))
    arguments = ("--standalone", str(EXAMPLE), "--data", str(text), *size, "--json")
    printed = succeed(run(folder, *command, *arguments, settings=SETTINGS, timeout=timeout))
    result: dict[str, float] = json.loads(printed.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("example")


def _when(name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in ALWAYS else (pytest.mark.long,)


@pytest.mark.slow
@pytest.mark.parametrize("installed", [pytest.param(each, id=each.name, marks=_when(each.name)) for each in INSTALLED])
def test_the_example_trains_alike_under_every_strategy(folder: Path, installed: plugins.Installed) -> None:
    found = trained(folder, installed.name, min(2, installed.info.max_ranks or 2))
    truth = trained(folder, "single", 1)
    assert found["strategy"] == installed.name
    assert found["steps"] == STEPS
    for loss in ("loss_first", "loss_last", "validation_loss"):
        assert found[loss] == pytest.approx(truth[loss], rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "ranks"), [("xla_fsdp", 2), ("xla_spmd", 1)])
def test_the_example_trains_alike_on_xla(folder: Path, strategy: str, ranks: int) -> None:
    found, truth = trained(folder, strategy, ranks, timeout=900), trained(folder, "single", 1)
    for loss in ("loss_first", "loss_last", "validation_loss"):
        assert found[loss] == pytest.approx(truth[loss], rel=1e-5)
