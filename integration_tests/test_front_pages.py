"""What the README shows as measured and run is what was, and CONTRIBUTING.md quotes the code as it is."""

from __future__ import annotations

import json
import re
import runpy

import pytest
from pages import ROOT, page

DRAW = runpy.run_path(str(ROOT / "docs" / "measured" / "draw.py"))
FIGURES = sorted((ROOT / "docs" / "measured").glob("*.json"))
MEASURED = page("README.md").table("what", "Shard", "beside it", "command")


@pytest.mark.parametrize("file", FIGURES, ids=lambda file: file.stem)
def test_pictures_are_drawn_from_the_figures_beside_them(file):
    assert file.with_suffix(".svg").read_text() == DRAW["draw"](json.loads(file.read_text()))


@pytest.mark.parametrize("file", FIGURES, ids=lambda file: file.stem)
def test_the_readme_shows_the_figures_of_the_picture(file):
    rows = {what: (ours, theirs) for what, ours, theirs, _ in MEASURED}
    for group in json.loads(file.read_text())["groups"]:
        ours, theirs = rows[group["what"]]
        for bar in group["bars"]:
            assert DRAW["figure"](bar) in (ours if bar.get("ours") else theirs), bar["who"]


def test_the_readme_shows_the_largest_difference_of_the_parity_table():
    largest = max(float(weights) for weights in re.findall(r"/ (\S+) \|", page("docs/reference/parity.md").text))
    assert [ours for what, ours, *_ in MEASURED if what.startswith("weights") and f" {largest:.1e} " in ours]


def test_what_was_measured_can_be_measured_again():
    commands = [command.split() for *_, command in MEASURED if command != "the same"]
    assert commands
    assert [script for _, script, *_ in commands if not (ROOT / script).is_file()] == []


def test_strategies_were_seen_to_run_where_their_parity_was_judged():
    seen = [re.findall(r"\w+", names) for names, *_ in page("README.md").table("strategies", "on", "ranks")]
    judged = re.findall(r"^\| `(\w+)` \|", page("docs/reference/parity.md").text, flags=re.MULTILINE)
    assert sorted(name for names in seen for name in names) == sorted(set(judged))


@pytest.mark.parametrize("block", page("CONTRIBUTING.md").blocks("py"), ids=lambda block: block.file)
def test_contributors_are_shown_code_as_it_is(block):
    assert dedented(block.text.removeprefix(f"# {block.file}\n")) in dedented((ROOT / block.file).read_text())


def dedented(text: str) -> str:
    return re.sub(r"^ +", "", text, flags=re.MULTILINE)
