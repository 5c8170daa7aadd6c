"""Campaigns on real ranks, of strategies that are right and of some with one mistake."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from shard_core import plugins
from shard_core.errors import InvalidOption
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.campaign import VERDICTS, campaign, others_of
from shard_core.testing.programs.coverage import Coverage
from shard_core.testing.programs.grammar import draw, legal
from shard_core.testing.programs.judgement import patience
from shard_core.testing.programs.kept import kept_programs
from shard_core.testing.programs.parts import PARTS
from shard_core.testing.programs.parts.dropout import MASKS
from shard_core.testing.programs.program import from_json, segments
from shard_core.testing.programs.writing.script import script_of

ROGUES = ("summed", "never_clips", "ignores_denominator", "resets_learning_rate", "forgets_buffers", "drops_moments")


@pytest.fixture
def rogues(site, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    entries = {"shard.strategies": dict.fromkeys(ROGUES, "rogues.plugin")}
    site.install("shard-rogues", requires=("shard-core>=1,<2",), entries=entries)


def test_kept_programs_come_first_and_all_are_counted(worlds, monkeypatch):
    few = {name: kept_programs()[name] for name in ("seed-again", "unused-beside-deferred", "beside-sparse-gradients")}
    monkeypatch.setattr("shard_core.testing.programs.campaign.kept_programs", lambda: few)
    told = []
    report = campaign(
        "ddp", count=3, seed=7, others=(), worlds=worlds, on_program=lambda origin, judgement: told.append(origin)
    )
    assert report.defect is None, report.defect
    kept = [name for name, program in few.items() if program.strategy == "ddp"]
    assert kept
    assert told == [*kept, "seed 7", "seed 8", "seed 9"]
    assert (report.count, report.kept, report.next_seed) == (3 + len(kept), len(kept), 10)
    assert set(report.verdicts) == set(VERDICTS)
    assert sum(each.count for each in report.refusals) == report.verdicts["refused"]
    assert report.programs_per_second > 0
    assert 0 < report.in_memory[0] < report.count
    assert report.in_memory[1] < report.seconds
    assert 0 < report.cells.share < report.pairs.share < 1


def test_kept_programs_end_as_they_did(worlds, monkeypatch):
    right = dataclasses.replace(kept_programs()["seed-again"], operations=())
    elsewhere = dataclasses.replace(right, operations=(ops.Switch(strategy="nobody_has_it"),))
    known = {"another-strategy": elsewhere, "refused-nothing": right}
    monkeypatch.setattr("shard_core.testing.programs.campaign.kept_programs", lambda: known)
    report = campaign("ddp", count=0, others=(), worlds=worlds)
    assert report.defect is not None
    assert (report.defect.origin, report.defect.judgement.symptom) == ("refused-nothing", "equal, once refused")


@pytest.mark.long
def test_one_rank(worlds):
    report = campaign("single", count=3, world_size=1, worlds=worlds)
    assert (report.verdicts["defect"], report.count - report.kept, report.others) == (0, 3, ())


@pytest.mark.long
def test_programs_go_on_with_other_numbers_of_ranks(worlds):
    told = []
    report = campaign(
        "ddp", count=12, seed=12, sizes=(1, 2, 3), others=(), worlds=worlds, on_program=lambda *each: told.append(each)
    )
    assert report.defect is None, report.defect
    drawn = [draw(seed, "ddp", others=(), sizes=(1, 2, 3)) for seed in range(12, 24)]
    reached = {each.world_size for program in drawn for each in segments(program)}
    assert reached == {1, 2, 3}
    assert report.verdicts["equal"] == len(told)


def test_ranks_that_share_layers_stay_as_many():
    if "tp" in {each.name for each in plugins.installed()}:
        with pytest.raises(InvalidOption, match="stay on as many ranks"):
            campaign("tp", count=1, sizes=(1, 2))


def test_nothing_begins_after_the_time():
    report = campaign("single", count=3, seed=4, minutes=1e-9, world_size=1, others=())
    assert (report.count, report.next_seed, report.programs_per_second) == (0, 4, 0.0)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ROGUES)
def test_a_mistake_is_found_and_shrunk(name, rogues, worlds):
    report = campaign(name, count=60, others=(), worlds=worlds)
    assert report.defect is not None
    assert report.verdicts["defect"] == 1
    program = report.defect.program
    assert legal(program)
    assert len(program.operations) <= 5
    assert from_json(program.to_json()) == program
    assert report.defect.origin == f"seed {report.next_seed - 1}"
    compile(report.defect.script, "script", "exec")
    assert report.defect.judgement.symptom in report.defect.script


def test_others_are_those_that_can_go_on():
    assert others_of(plugins.find("ddp"), 1) == ()
    others = others_of(plugins.find("ddp"), 2)
    assert not {"ddp", "single", "tp"} & set(others)
    for name in others:
        assert "cpu" in plugins.find(name).devices


def test_only_what_was_reached_is_covered():
    program = draw(0, "ddp")
    coverage = Coverage("ddp", 2, ())
    coverage.add(program, 0)
    assert (coverage.pairs.seen, coverage.cells.seen) == (0, 0)
    coverage.add(program, 1)
    assert coverage.pairs.seen == 0
    settings = 1 + len(program.options) + program.late
    assert 0 < coverage.cells.seen <= settings * len(program.models[0].parts) or len(program.models) > 1
    coverage.add(program, 2)
    assert coverage.pairs.seen == 1
    assert 0 < coverage.pairs.share < 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_ranks_compute_on_the_device_that_is_asked_for_and_see_it(worlds):
    environments = []

    def noting(size, environment):
        environments.append(environment)
        return worlds(size, environment)

    report = campaign("ddp", count=1, device="cuda", others=(), worlds=noting)
    assert not report.passed
    assert report.kept == 0
    assert [each.symptom for each in report.refusals] == ["setup LaunchError"]
    assert report.refusals[0].sentence.startswith("accelerator 'cuda' was asked for")
    assert all("CUDA_VISIBLE_DEVICES" not in each for each in environments)


def test_the_judge_follows_the_masks_and_the_time_of_a_device():
    program = draw(0, "ddp", device="cuda")
    assert from_json(program.to_json()) == program
    assert "get_strategy('ddp', accelerator='cuda'" in script_of(program)
    assert patience(program) > patience(dataclasses.replace(program, device="", compiled=""))
    part = PARTS["dropout"]().to("meta")
    part(torch.empty(2, 3, part.layer.in_features, device="meta"), torch.empty(0))
    assert len(MASKS.shown) == 1
    MASKS.shown.clear()
