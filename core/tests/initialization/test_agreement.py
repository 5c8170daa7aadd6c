"""Ranks that build the same module get the same values; ranks that do not raise."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import CannotReplay
from shard_core.initialization.recording import record


def weight_and_next_number(seeds):
    ranks = ProcessGroupCollectives()
    torch.manual_seed(seeds[ranks.rank])
    with record(ranks) as recording:
        module = nn.Linear(3, 3)
    if ranks.rank == 0:
        # Looking at a tensor on one rank changes nothing.
        module.weight.abs().sum()
    values = {}
    recording.replay(dict(module.named_parameters()), values.__setitem__)
    return values["weight"].tolist(), torch.rand(2).tolist()


def tied_weight_and_next_number(seeds):
    ranks = ProcessGroupCollectives()
    torch.manual_seed(seeds[ranks.rank])
    with record(ranks) as recording:
        module = tied_layers()
    values = {}
    recording.replay(dict(module.named_parameters()), values.__setitem__)
    return values["0.weight"].tolist(), torch.rand(2).tolist()


def weight_drawn_twice(looking_rank):
    ranks = ProcessGroupCollectives()
    torch.manual_seed(4)
    with record(ranks) as recording:
        module = nn.Linear(3, 3)
        module.reset_parameters()
    if ranks.rank == looking_rank:
        module.weight.abs().sum().item()
    values = {}
    recording.replay(dict(module.named_parameters()), values.__setitem__)
    return values["weight"].tolist()


def tied_layers():
    layers = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    layers[1].weight = layers[0].weight  # what was drawn last is nobody's
    return layers


def plain_weight_and_next_number(seed):
    torch.manual_seed(seed)
    weight = nn.Linear(3, 3).weight.tolist()
    return weight, torch.rand(2).tolist()


def refusal_of_modules_that_differ(way):
    ranks = ProcessGroupCollectives()
    torch.manual_seed(0)
    random.seed(ranks.rank)
    with record(ranks) as recording:
        if way == "values":
            scale = torch.tensor(random.random())
            weight = torch.rand(3) * scale
        elif way == "shape":
            weight = torch.rand(3 + ranks.rank)
        else:
            weight = torch.rand(3)
            for _ in range(ranks.rank):
                weight += 1
    try:
        recording.replay({"weight": weight}, lambda name, value: None)
    except CannotReplay as refusal:
        return str(refusal)


def refusal_of_constants_that_differ():
    ranks = ProcessGroupCollectives()
    with record(ranks) as recording:
        pass
    try:
        recording.replay({"table": torch.full((2,), float(ranks.rank))}, lambda name, value: None)
    except CannotReplay as refusal:
        return str(refusal)


def test_same_seed_everywhere(worlds):
    want = plain_weight_and_next_number(4)
    assert worlds(2).run(weight_and_next_number, [4, 4]) == [want, want]


def test_weights_are_those_of_rank_0_and_later_numbers_each_rank_s_own(worlds):
    want = plain_weight_and_next_number(4)
    torch.manual_seed(5)
    own = torch.rand(2).tolist()
    assert worlds(2).run(weight_and_next_number, [4, 5]) == [want, (want[0], own)]


@pytest.mark.parametrize("seeds", [[4, 4], [4, 5]], ids=["seeded alike", "seeded differently"])
def test_what_was_drawn_last_for_nobody_is_no_difference(worlds, seeds):
    torch.manual_seed(4)
    weight, following = tied_layers()[0].weight.tolist(), torch.rand(2).tolist()
    torch.manual_seed(seeds[1])
    own = following if seeds[1] == 4 else torch.rand(2).tolist()
    assert worlds(2).run(tied_weight_and_next_number, seeds) == [(weight, following), (weight, own)]


@pytest.mark.parametrize("looking_rank", [0, 1])
def test_what_one_rank_has_looked_at_is_no_difference(worlds, looking_rank):
    torch.manual_seed(4)
    module = nn.Linear(3, 3)
    module.reset_parameters()
    assert worlds(2).run(weight_drawn_twice, looking_rank) == [module.weight.tolist()] * 2


def test_modules_that_differ_are_refused_on_every_rank(worlds):
    for way in ("values", "shape", "operations"):
        one, other = worlds(2).run(refusal_of_modules_that_differ, way)
        assert one == other
        assert one.startswith("ranks built different modules: where rank 0 did ")
        assert "rank 1 did " in one


def test_constants_that_differ_are_refused_on_every_rank(worlds):
    one, other = worlds(2).run(refusal_of_constants_that_differ)
    assert one == other
    assert "table: values" in one
