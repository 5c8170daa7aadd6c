"""The table that holds every strategy against plain PyTorch: its script, and what stands on the page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environments import ROOT, SETTINGS, run, succeed
from pages import page

from shard_core import plugins
from shard_core.testing.oracle import Distance

sys.path.append(str(ROOT / "integration_tests" / "benchmarks"))
import parity_table  # the folder of a script is where Python looks for what stands beside it

SCRIPT = str(ROOT / "integration_tests" / "benchmarks" / "parity_table.py")
FAR = {"loss": 1e-3, "norm": 1e-3, "weights": 1e-3}
NEAR = {"loss": 1e-7, "norm": 1e-7, "weights": 1e-7}


@pytest.mark.long
def test_rows_of_one_run_join_those_of_another(tmp_path: Path) -> None:
    copy = tmp_path / "parity.md"
    copy.write_text(f"# Title\n\n|{'|'.join(parity_table.HEADER)}|\n|{'---|' * len(parity_table.HEADER)}\n\nThe end.\n")
    arguments = ("--models", "gpt", "--steps", "2", "--merge", "--page", str(copy))
    for strategies in (["fsdp"], ["single", "fsdp"]):
        command = (sys.executable, SCRIPT, "--strategies", *strategies, *arguments)
        succeed(run(ROOT, *command, settings=SETTINGS))
    lines = copy.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("# Title", "The end.")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert [cells[:2] for cells in rows] == [["`fsdp`", "2"], ["`single`", "1"]]
    for _, _, gpt, *others, versions in rows:
        loss, norm, weights = map(float, gpt.split(" / "))
        assert max(loss, norm, weights) < 1e-5
        assert set(others) == {"not run"}
        assert "torch" in versions


@pytest.mark.parametrize("figure", NEAR)
def test_a_figure_beyond_its_bound_is_named(figure: str) -> None:
    assert parity_table.broken({"gpt": Distance(**NEAR), "gpt2": "no plan"}) == []
    for beyond in (FAR[figure], float("nan")):
        (sentence,) = parity_table.broken({"gpt": Distance(**NEAR), "llama": Distance(**{**NEAR, figure: beyond})})
        assert sentence.startswith(f"llama: {figure} ")


def test_the_page_has_every_strategy_and_no_broken_bound() -> None:
    rows = page("docs/reference/parity.md").table(*parity_table.HEADER)
    assert {each.name for each in plugins.installed()} <= {name for name, *_ in rows}
    for name, ranks, *cells, _ in rows:
        for model, cell in zip(parity_table.MODELS, cells, strict=True):
            if cell == parity_table.LEFT_OUT.get((name, model)):
                continue
            loss, norm, weights = map(float, cell.split(" / "))
            found = {model: Distance(loss=loss, norm=norm, weights=weights)}
            assert parity_table.broken(found) == [], f"{name} on {ranks}"
