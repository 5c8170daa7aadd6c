from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from shard_core.capability import Capability
from shard_core.cli.main import main
from shard_core.options import options_of
from shard_core.plugins import find, installed
from shard_core.precision.policies import POLICIES
from shard_core.run_options import RunOptions

PLUGIN = """
import dataclasses
from shard_core.options import Option
from shard_core.plugins import StrategyInfo, hookimpl
from shard_core.precision.policies import POLICIES


@hookimpl
def shard_strategy(name):
    return StrategyInfo(
        name=name,
        summary="a toy",
        factory="toy:Toy",
        precisions=("32-true", "fp8", "bf16-true"),
        policies={"bf16-true": dataclasses.replace(POLICIES["bf16-true"], optimizer="float32")},
        options=(Option(name="stage", type="int", default=1, help="how far"),),
        presets={"stage": 3},
    )


@hookimpl
def shard_unavailable(name):
    return "libtoy is missing."
"""


def show(name: str) -> dict:
    result = CliRunner().invoke(main, ["show", name, "--json"])
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["ddp", "single"])
def test_json_says_all_a_strategy_says(name):
    card, info = show(name), find(name)
    assert (card["name"], card["summary"], card["package"]) == (name, info.summary, "shard-core")
    assert (card["available"], card["problem"]) == (True, None)
    assert {each["name"]: each["promise"] for each in card["capabilities"]} == {
        each.name: each.value for each in info.capabilities
    }
    assert card["devices"] == list(info.devices)
    assert card["seen_on"]["cpu"]["device"] == "CPU"
    assert [each["name"] for each in card["precisions"]] == list(info.precisions)
    assert [set(each) for each in card["options"]] == [{"name", "type", "default", "help"}] * len(info.options)


def test_precisions_are_rows_of_the_one_table():
    rows = {each["name"]: each for each in show("ddp")["precisions"]}
    assert rows["16-mixed"] == {
        "name": "16-mixed",
        "parameter": "float32",
        "compute": "float16",
        "reduce": "float32",
        "accumulate": "float32",
        "optimizer": "float32",
        "buffer": "float32",
        "autocast": True,
        "scaled": True,
    }


def test_common_arguments_are_listed_too():
    options = {each["name"]: each for each in show("single")["common_options"]}
    assert list(options) == [each.name for each in options_of(RunOptions)]
    assert options["devices"]["type"] == "int | str | Sequence[int]"
    assert options["devices"]["default"] == "auto"
    assert options["timeout"]["default"] == "0:30:00"
    assert all(each["help"] for each in options.values())


def test_presets_are_the_defaults_of_a_name_and_a_problem_is_printed(site):
    site.install("shard-toy", entries={"shard.strategies": {"toy": "toy_show"}}, modules={"toy_show": PLUGIN})
    card = show("toy")
    assert card["options"] == [{"name": "stage", "type": "int", "default": 3, "help": "how far"}]
    assert card["precisions"][1] == {"name": "fp8"}
    assert card["precisions"][2]["optimizer"] == "float32"  # its own table, not core's
    assert card["problem"] == "strategy 'toy' of shard-toy 1.0.0 cannot run here: libtoy is missing."
    shown = CliRunner().invoke(main, ["show", "toy"])
    assert shown.exit_code == 0
    assert "libtoy is missing." in shown.stdout
    assert "stage: int = 3" in shown.stdout


def test_people_read_the_same():
    text = CliRunner(env={"COLUMNS": "100"}).invoke(main, ["show", "ddp"]).stdout
    info = find("ddp")
    assert text.startswith(f"ddp: {info.summary}\nshard-core ")
    assert "\nseen to run on: CPU (torch " in text
    for capability in Capability:
        assert (f"\n  {capability.name} " in text) == (capability in info.capabilities)
    for row in (
        POLICIES["bf16-mixed"].compute,
        "bucket_cap_mb: float = 25.0",
        "devices: int | str | Sequence[int] = 'auto'",
    ):
        assert row in text


def test_every_installed_strategy_can_be_shown():
    usable = [each.name for each in installed() if each.problem is None]
    assert {"ddp", "single"} <= set(usable)
    for name in usable:
        assert CliRunner().invoke(main, ["show", name]).exit_code == 0
