"""What is worth trying."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_deepspeed.config.inert import STAGES

SMALL, LARGE = nn.Linear(3, 3), nn.Linear(1000, 2000)


def proposed(name: str, module: nn.Module, ranks: int = 2) -> list[Any]:
    proposals = get_strategy(name, devices=ranks).engine_worth_trying(module, ranks)
    found = []
    with contextlib.suppress(StopIteration):
        found.append(next(proposals))
        found.append(proposals.send({}))
    return found


@pytest.mark.parametrize("module", [SMALL, LARGE])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_setting_can_be_given(stage: int, module: nn.Module) -> None:
    name = f"deepspeed_stage_{stage}"
    settings = [setting for each in proposed(name, module) for setting in each]
    # At stage 3 messages overlap in streams, and CPUs have none.
    assert ({"overlap_comm": False} in settings) == (stage != 3 or torch.cuda.is_available())
    assert any("param_persistence_threshold" in setting for setting in settings) == (stage == 3)
    for setting in settings:
        assert all(stage in STAGES[option] for option in setting)
        get_strategy(name, **setting)


def test_messages_are_no_larger_than_the_model() -> None:
    sizes = [setting["reduce_bucket_size"] for setting in proposed("deepspeed_stage_2", LARGE)[0]]
    assert sizes == [500_000, 2_002_000]
    assert proposed("deepspeed_stage_2", SMALL)[0] == [{"reduce_bucket_size": 12}]


def test_one_rank_sends_nothing() -> None:
    assert proposed("deepspeed_stage_3", LARGE, ranks=1) == []
