"""A script that names no strategy trains under every one, unchanged, and comes to what plain PyTorch does."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import single_file_gpt as script
import torch
from environments import SETTINGS, run, succeed

from shard_core import plugins

STEPS, BATCH, ACCUMULATE, EVALUATE_EVERY = 6, 4, 3, 3
INSTALLED = [each for each in plugins.installed() if each.info is not None and not each.problem]
#: Options of some names, and how their configurations then show them; under tp the model would not train without.
OPTIONS = {
    "ddp": ("bucket_cap_mb=0.01", "bucket_cap_mb=0.01"),
    "fsdp": ('auto_wrap_policy=["__main__:Block"]', "auto_wrap_policy=[<class '__main__.Block'>]"),
    "hsdp": ("device_mesh=[2, 1]", "device_mesh=(2, 1)"),
    "tp": ('plan={"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}', "'blocks.*.mlp.down': 'rowwise'"),
}
#: The others wait for the long run; test_example.py trains under two of them in every run.
ALWAYS = ("fsdp",)


@functools.cache
def in_plain_pytorch() -> dict[str, list[float]]:
    """Train the script's model on its batches, by a loop that knows of no strategy."""
    torch.manual_seed(script.SEED)
    model = script.GPT()
    optimizer = script.make_optimizer(model)
    found: dict[str, list[float]] = {"losses": [], "norms": [], "trained on": [], "held out": []}
    for step in range(STEPS):
        if step % EVALUATE_EVERY == 0:
            for split in ("trained on", "held out"):
                batches = [script.get_batch(split, -1 - number, BATCH) for number in range(2)]
                with torch.no_grad():
                    found[split].append(sum(float(model(*batch)[1]) for batch in batches) / 2)
        for group in optimizer.param_groups:
            group["lr"] = script.rate_at(step, STEPS)
        total = 0.0
        for micro in range(ACCUMULATE):
            _, loss = model(*script.get_batch("trained on", step * ACCUMULATE + micro, BATCH))
            (loss / ACCUMULATE).backward()
            total += float(loss.detach()) / ACCUMULATE
        found["losses"].append(total)
        found["norms"].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def under(name: str, folder: Path, *arguments: str, ranks: int) -> dict[str, Any]:
    """Run the script as its users do."""
    option, shown = OPTIONS.get(name, ("", ""))
    options = ["--option", option] if option else []
    command = (sys.executable, "-m", "shard_core", "run", "--strategy", name, *options, "--nproc-per-node", str(ranks))
    numbers = {"steps": STEPS, "batch": BATCH, "accumulate": ACCUMULATE, "evaluate-every": EVALUATE_EVERY}
    asked = [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
    succeed(run(folder, *command, script.__file__, str(folder), *asked, *arguments, settings=SETTINGS, timeout=240))
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert result["strategy"] == name
    assert shown in result["config"]
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "installed",
    [pytest.param(each, id=each.name, marks=() if each.name in ALWAYS else pytest.mark.long) for each in INSTALLED],
)
def test_one_script_trains_alike_under_every_strategy(tmp_path: Path, installed: plugins.Installed) -> None:
    assert installed.info is not None
    ranks = min(2, installed.info.max_ranks or 2)
    found, truth = under(installed.name, tmp_path, ranks=ranks), in_plain_pytorch()
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(truth[what], rel=2e-5), what
    for split in ("trained on", "held out"):
        assert [each[split] for each in found["evaluations"]] == pytest.approx(truth[split], rel=2e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [("fsdp", "tp"), ("tp", "ddp"), ("deepspeed_stage_1", "fsdp")])
def test_the_script_resumes_under_another_strategy(tmp_path: Path, first: str, second: str) -> None:
    begun = under(first, tmp_path, "--stop", "3", ranks=2)["losses"]
    resumed = under(second, tmp_path, "--resume", ranks=2)["losses"]
    assert [*begun, *resumed] == pytest.approx(in_plain_pytorch()["losses"], rel=2e-5)
