from __future__ import annotations

import collections
import enum
import math
import random

import numpy as np
import pytest
import torch
from fixtures.single_rank import load, save
from torch import nn

from shard_core.checkpoint.format.values import decode
from shard_core.errors import CheckpointCorrupted, CheckpointError


def _round_trip(path, values):
    save(path, nn.Linear(1, 1), values=values)
    return load(path, nn.Linear(1, 1)).values


def test_values_come_back_as_they_were(tmp_path):
    values = {
        "step": 2**70,
        "none": None,
        "nested": {"a": [1, 2.5, "text", True, (1, (2,), [])], "": {}, "$odd": 1, 3: {None: -0.0}},
        "floats": [math.inf, -math.inf, 0.1, 1e-320],
        "counter": collections.Counter({30: 1, 60: 2}),
        "python": random.Random(0).getstate(),
    }
    found = _round_trip(tmp_path / "checkpoint", values)
    assert found == values
    assert repr(found) == repr(values)


class Phase(enum.IntEnum):
    WARM = 3


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (collections.OrderedDict(a=1), dict),
        (Phase.WARM, int),
        (np.float64(0.5), float),
        (Text("a"), str),
        (nn.Parameter(torch.ones(2)), torch.Tensor),
    ],
)
def test_what_extends_a_plain_value_comes_back_as_that(tmp_path, value, kind):
    found = _round_trip(tmp_path / "checkpoint", {"value": value})["value"]
    assert type(found) is kind
    assert bool(torch.as_tensor(found == value).all())


@pytest.mark.parametrize("value", [collections.namedtuple("Pair", "a b")(1, 2), np.float32(0.5), np.int64(3)])
def test_what_would_lose_more_is_refused(tmp_path, value):
    with pytest.raises(CheckpointError, match="'value' is a"):
        _round_trip(tmp_path / "checkpoint", {"value": value})


def test_not_a_number_comes_back(tmp_path):
    assert math.isnan(_round_trip(tmp_path / "checkpoint", {"loss": math.nan})["loss"])


def test_tensors_anywhere_become_tensors_of_the_checkpoint(tmp_path):
    values = {"rng": torch.get_rng_state(), "ema": {"layer.weight": torch.randn(2, 3).t(), "list": [torch.tensor(3)]}}
    found = _round_trip(tmp_path / "checkpoint", values)
    torch.testing.assert_close(found, values, rtol=0, atol=0)


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.3, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[3],
        ),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.1, 0.3),
    ],
)
def test_schedulers_go_on_where_they_were(tmp_path, schedule):
    rates = []
    saved = None
    for start in (0, 4):
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = schedule(optimizer)
        if start:
            scheduler.load_state_dict(load(saved, model, optimizer).values["scheduler"])
        for step in range(start, 8):
            if step == 4 and not start:
                saved = tmp_path / "checkpoint"
                save(saved, model, optimizer, {"scheduler": scheduler.state_dict()})
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau) else []))
            rates.append((step, optimizer.param_groups[0]["lr"]))
    assert rates[4:8] == rates[8:]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": [1, {2, 3}]}, "x.a.1"),
        (object(), "x"),
        ({"a": {"b": torch.float32}}, "x.a.b"),
        ([b"bytes"], "x.0"),
        ({(1, 2): 3}, "x"),
        (collections.defaultdict(list), "x"),
        (print, "x"),
    ],
)
def test_anything_else_is_refused_by_name(tmp_path, value, name):
    with pytest.raises(CheckpointError, match=f"^'{name}' "):
        save(tmp_path / "checkpoint", nn.Linear(1, 1), values={"x": value})
    assert not (tmp_path / "checkpoint").exists()


def test_keys_of_the_state_are_strings(tmp_path):
    with pytest.raises(CheckpointError, match="the state has the key 3; keys are strings"):
        save(tmp_path / "checkpoint", nn.Linear(1, 1), values={3: 4})


def test_tensors_with_one_name_are_refused(tmp_path):
    twice = {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}
    with pytest.raises(CheckpointError, match=r"two tensors in the state are called 'a.b'"):
        save(tmp_path / "checkpoint", nn.Linear(1, 1), values=twice)


@pytest.mark.parametrize(
    "value",
    [
        {"$float": "1"},
        {"$float": []},
        {"$tuple": 3},
        {"$dict": [[1]]},
        {"$dict": [[[], 1]]},
        {"$scalar": ["F99", 1]},
        {"$scalar": ["U8", 1000]},
        {"$scalar": ["F32"]},
        {"$import": "os"},
        {"$float": "nan", "$tuple": []},
    ],
)
def test_marks_that_no_save_writes_are_refused(value):
    with pytest.raises(CheckpointCorrupted, match="the manifest holds"):
        decode({"a": [value]}, lambda name: name)


def _nested(wrap, levels):
    value = 1
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    "wrap",
    [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, lambda x: {3: x}, lambda x: {"$": (x,)}],
    ids=["list", "tuple", "dict", "dict of numbers", "both"],
)
def test_values_nested_too_deeply_to_be_read_again_are_not_saved(tmp_path, wrap):
    step = 2 if isinstance(wrap(1), dict) and "$" in wrap(1) else 1
    deep = _nested(wrap, 100 // step)
    assert _round_trip(tmp_path / "checkpoint", {"x": deep})["x"] == deep
    for levels in (101, 10_000):
        with pytest.raises(CheckpointError, match=r"^'x[.0-9a$]*' is nested more than 100 levels deep; give a flatter"):
            save(tmp_path / "deeper", nn.Linear(1, 1), values={"x": _nested(wrap, levels)})
    assert not (tmp_path / "deeper").exists()
