"""What is worth trying, and that it is what it says when it is tried."""

import json
import subprocess
import sys
from typing import Any

import pytest
from torch import nn

from shard_core import get_strategy
from shard_core.backend import find_units

SCRIPT = """
import torch

def make_model():
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128, bias=False) for _ in range(16)])
    return model, torch.ones(2, 128)

def loss(output, batch):
    return output.square().mean()
"""


def blocks(count: int = 8) -> nn.Module:
    return nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(count)])


def proposed(*bests: dict[str, Any], ranks: int = 2, module: nn.Module | None = None, **options: Any) -> list[Any]:
    proposals = get_strategy("fsdp", **options).engine_worth_trying(module or blocks(), ranks)
    found = [*([first] if (first := next(proposals, None)) is not None else [])]
    for best in bests:
        try:
            found.append(proposals.send(best))
        except StopIteration:
            break
    return found


def test_units_differ_and_prefetching_is_tried_on_the_best_of_them() -> None:
    layouts, prefetching = proposed({"unit_bytes": 1, "reshard_after_forward": False})
    counts = [len(find_units(blocks(), each["unit_bytes"])) for each in layouts]
    assert counts == [0, 8, 8, 4, 4]
    assert [each.get("reshard_after_forward") for each in layouts] == [None, None, False, None, False]
    assert prefetching == [
        {"unit_bytes": 1, "reshard_after_forward": False, "forward_prefetch": True},
        {"unit_bytes": 1, "reshard_after_forward": False, "backward_prefetch": None},
        {"unit_bytes": 1, "reshard_after_forward": False, "forward_prefetch": 2, "backward_prefetch": 2},
    ]
    assert len(proposed({"unit_bytes": 4 * 10 * 10 * 2})[1]) == 2  # of four units, two ahead would be most


def test_what_could_make_no_difference_is_not_tried() -> None:
    assert proposed(ranks=1) == []
    assert proposed({}, module=nn.Linear(2, 2)) == [[{"unit_bytes": 64 * 2**20}]]
    assert len(proposed({})) == 1  # one unit has no next one to gather
    by_policy = proposed({}, auto_wrap_policy={nn.Linear}, sharding_strategy="SHARD_GRAD_OP")
    assert by_policy[0] == [{"unit_bytes": 64 * 2**20}]
    assert len(by_policy) == 2


def test_every_setting_can_be_given() -> None:
    for settings in proposed({"unit_bytes": 1}):
        for setting in settings:
            get_strategy("fsdp", **setting)


@pytest.mark.long
def test_settings_differ_in_memory_and_not_in_losses(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    arguments = ["--strategy", "fsdp", "--loss", f"{script}:loss", "--rounds", "2", "--json", f"{script}:make_model"]
    done = subprocess.run(
        [sys.executable, "-m", "shard_core", "tune", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    card = json.loads(done.stdout)
    rows = card["rows"]
    assert all(row["same_loss"] and row["problem"] is None for row in rows)
    assert card["best"] is None or card["best"] in [row["setting"] for row in rows]
    defaults, per_block, kept, *_ = (row["peak_bytes"] for row in rows)
    assert rows[2]["setting"] == {"unit_bytes": 1, "reshard_after_forward": False}
    block = 128 * 128 * 4
    assert per_block == pytest.approx(4 * 16 * block / 2 + block, rel=0.1)  # AdamW keeps two moments
    assert per_block < kept < defaults
