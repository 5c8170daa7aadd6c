"""``shard tune`` on strategies whose settings are known to be fast, slow, wrong or deadly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from shard_core.cli.main import main

SCRIPT = """
import torch


def make_model():
    print("made")
    return torch.nn.Linear(4, 1), torch.ones(6, 4)


def five():
    return torch.nn.Linear(4, 1), torch.ones(5, 4)


def loss(output, batch):
    return output.square().mean()


def failing_loss(output, batch):
    return {}["loss"]
"""

PLUGIN = """
import dataclasses

from shard_core.options import option, options_of
from shard_core.plugins import hookimpl
from shard_core.strategies.config import SingleConfig
from shard_core.strategies.plugin import SINGLE

@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SingleConfig):
    pace: str = option("steady", "how long a step takes")
    polished: bool = option(False, "whether it takes a little less")
    among: tuple = option(("slow", "steady"), "which paces are worth trying")

@hookimpl
def shard_strategy(name):
    return dataclasses.replace(
        SINGLE,
        name=name,
        factory=f"paced_strategies:{name}",
        options=options_of(Config),
        max_ranks=1 if name == "paced" else None,
    )
"""

STRATEGIES = """
import os
import time
import weakref

from paced_plugin import Config
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import SetupError
from shard_core.strategies.single import SingleStrategy

SECONDS = {"slow": 0.15, "steady": 0.08, "fast": 0.03, "wrong": 0.0, "broken": 0.0, "deadly": 0.0}
earlier = weakref.WeakSet()

class Paced:
    config_type = Config

    def engine_worth_trying(self, module, world_size):
        best = yield [{"pace": pace} for pace in self.config.among]
        if best:
            yield [{**best, "polished": True}]

    def engine_setup(self, module, optimizers, names):
        if list(earlier):
            raise SetupError("the model before this one is still alive.")
        earlier.add(module)
        if self.config.pace == "broken":
            raise SetupError("this pace is broken.")
        if self.config.pace == "deadly" and self.global_rank == 1:
            os._exit(7)
        return super().engine_setup(module, optimizers, names)

    def engine_backward(self, loss, module, **more):
        time.sleep(SECONDS[self.config.pace] * (0.5 if self.config.polished else 1))
        super().engine_backward(loss * (-1 if self.config.pace == "wrong" else 1), module, **more)

class paced(Paced, SingleStrategy):
    pass

class paced_ranks(Paced, SingleStrategy):
    engine_collectives_types = {"process_group": ProcessGroupCollectives}
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def paces(site):
    site.install(
        "shard-paced",
        requires=("shard-core>=1,<2",),
        entries={"shard.strategies": {"paced": "paced_plugin", "paced_ranks": "paced_plugin"}},
        modules={"paced_plugin": PLUGIN, "paced_strategies": STRATEGIES},
    )
    return site


def tune(script, *more, strategy="paced", make_model="make_model", devices=1):
    arguments = ["--strategy", strategy, "--devices", devices, "--loss", f"{script}:loss", "--rounds", 3, "--steps", 2]
    return CliRunner().invoke(main, list(map(str, ["tune", *arguments, *more, f"{script}:{make_model}"])))


def card(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout[result.stdout.index("{") :])


def text(result):
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def among(*paces):
    return ("--option", f"among={paces!r}")


@pytest.mark.slow
def test_the_fastest_that_trains_alike_is_named_and_all_are_shown(script, paces):
    found = card(tune(script, "--json", *among("slow", "wrong", "broken", "fast", "steady")))
    rows = {json.dumps(row["setting"]): row for row in found["rows"]}
    assert [row["setting"].get("pace") for row in found["rows"]] == [None, "slow", "wrong", "broken", "fast", "fast"]
    assert found["best"] == {"pace": "fast", "polished": True}
    assert rows['{"pace": "slow"}']["ratio"] > 1.5
    assert rows['{"pace": "fast"}']["ratio"] < 0.7
    assert not rows['{"pace": "wrong"}']["same_loss"]
    assert rows['{"pace": "wrong"}']["ratio"] < 0.7
    assert rows['{"pace": "broken"}']["problem"] == "this pace is broken."
    assert rows['{"pace": "broken"}']["ratio"] is None
    assert {row["peak_bytes"] is None for row in found["rows"]} == {False, True}
    assert "Fastest: pace='fast', polished=True, in 0." in found["says"]


@pytest.mark.long
@pytest.mark.slow
def test_the_best_is_printed_as_it_is_pasted(script, paces):
    output = text(tune(script, *among("fast")))
    assert "get_strategy('paced', among=('fast',), pace='fast', polished=True)" in output
    assert "--option pace=fast --option polished=True" in output


@pytest.mark.slow
def test_defaults_that_are_fastest_are_kept(script, paces):
    output = text(tune(script, *among("slow")))
    assert "Keep what you gave: no setting that trains the same is faster" in output
    assert "get_strategy" not in output


@pytest.mark.slow
def test_what_the_user_has_set_is_kept(script, paces):
    output = text(tune(script, "--option", "pace=slow", *among("fast")))
    assert "Strategy 'paced' names no setting worth trying besides what you gave, for this model on 1 rank." in output


def test_a_strategy_may_have_nothing_to_tune_and_is_timed_all_the_same(script):
    found = card(tune(script, "--json", strategy="single"))
    (defaults,) = found["rows"]
    assert (defaults["setting"], defaults["problem"], found["best"]) == ({}, None, None)
    assert defaults["milliseconds"] > 0
    assert (
        "Strategy 'single' names no setting worth trying besides the defaults, for this model on 1 rank."
        in found["says"]
    )


@pytest.mark.long
def test_a_rank_that_dies_of_a_setting_costs_that_setting_alone(script, paces):
    arguments = ["--strategy", "paced_ranks", "--loss", f"{script}:loss", "--rounds", "2", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "shard_core", "tune", *arguments, *among("slow", "deadly"), f"{script}:make_model"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(paces.folder)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    defaults, slow, deadly = json.loads(done.stdout)["rows"]
    assert defaults["ratio"] == 1
    assert deadly["problem"] == "rank 1 of 2 left with exit status 7; what it printed stands above."
    assert slow["ratio"] > 1.3
    assert slow["same_loss"]
    assert "made" in done.stderr


@pytest.mark.parametrize(
    ("make_model", "more", "says"),
    [
        ("make_model", ["--strategy", "dpd"], "did you mean 'ddp'?"),
        ("make_model", ["--devices", "2"], "strategy 'single' runs on at most 1 rank"),
        ("make_model", ["--option", "speed=3"], "has no option 'speed'"),
        ("make_model", ["--optimizer", "adam"], "did you mean 'adamw'?"),
        ("make_modle", [], "script.py has no function 'make_modle'; did you mean 'make_model'?"),
        ("make_model", ["--rounds", "1"], "1 is not in the range x>=2"),
    ],
)
def test_what_cannot_be_measured_gets_a_sentence(script, make_model, more, says):
    result = tune(script, *more, strategy="single", make_model=make_model)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_what_is_found_wrong_on_a_rank_gets_a_sentence_too(script):
    result = tune(script, "--option", "process_group_backend=glo", strategy="ddp", devices=2)
    assert result.exit_code == 2
    assert result.stderr == "Error: torch has no process group backend 'glo' here; did you mean 'gloo'? it has: gloo.\n"


def test_defaults_that_fail_are_reported_though_nothing_else_is_tried(script, paces):
    result = tune(script, *among("fast"), "--option", "pace=broken", "--option", "polished=True")
    assert (result.exit_code, result.stderr) == (2, "Error: this pace is broken.\n")


def test_defaults_that_fail_leave_nothing_to_compare_with(script, paces):
    result = tune(script, "--loss", f"{script}:failing_loss", *among("fast"))
    assert result.exit_code == 2
    assert "nothing could be measured: KeyError: 'loss'" in result.stderr
