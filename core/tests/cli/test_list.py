from __future__ import annotations

import importlib.metadata
import json

from click.testing import CliRunner

from shard_core.cli.main import main

PLUGIN = """
from shard_core.plugins import StrategyInfo, hookimpl


@hookimpl
def shard_strategy(name):
    return StrategyInfo(name=name, summary="a [toy] for tests", factory="toy:Toy")


@hookimpl
def shard_unavailable(name):
    return "libtoy is missing; install it with `pip install libtoy`."
"""


def listed() -> dict[str, dict[str, object]]:
    result = CliRunner().invoke(main, ["list", "--json"])
    assert result.exit_code == 0
    return {row["name"]: row for row in json.loads(result.stdout)}


def test_built_ins():
    version = importlib.metadata.version("shard-core")
    rows = listed()
    for name in ("ddp", "single"):
        row = rows[name]
        assert (row["package"], row["version"]) == ("shard-core", version)
        assert (row["available"], row["problem"]) == (True, None)
        assert row["summary"]
        assert set(row["seen_on"]) == {"cpu", "cuda"}


def test_what_cannot_be_used_is_listed_with_its_sentence(site):
    site.install("shard-toy", entries={"shard.strategies": {"toy": "toy_list"}}, modules={"toy_list": PLUGIN})
    sentence = (
        "strategy 'toy' of shard-toy 1.0.0 cannot run here: libtoy is missing; install it with `pip install libtoy`."
    )
    assert listed()["toy"] == {
        "name": "toy",
        "package": "shard-toy",
        "version": "1.0.0",
        "summary": "a [toy] for tests",
        "seen_on": None,
        "available": False,
        "problem": sentence,
    }
    shown = CliRunner(env={"COLUMNS": "300"}).invoke(main, ["list"])
    assert shown.exit_code == 0
    assert "a [toy] for tests" in shown.stdout
    assert "seen on: no record" in shown.stdout
    assert sentence in shown.stdout


def test_broken_backend_breaks_no_other(site):
    site.install("shard-toy", entries={"shard.strategies": {"toy": "toy_list"}}, modules={"toy_list": "1 / 0"})
    rows = listed()
    assert "ZeroDivisionError: division by zero" in str(rows["toy"]["problem"])
    assert rows["ddp"]["available"]
