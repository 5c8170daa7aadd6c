"""What a rank is told when another is gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

_LEFT = """\
import os, sys

import torch

from shard_core import get_strategy
from shard_core.errors import CollectiveError

with get_strategy("ddp", accelerator="cpu") as strategy:
    strategy.barrier()  # both are there
    if strategy.global_rank == 1:
        os._exit(0)
    try:
        strategy.{call}
    except CollectiveError as error:
        sys.stdout.write(f"{{error}}\\n")
        sys.stdout.flush()
    os._exit(0)  # to leave in order takes both ranks
"""


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ("all_reduce(torch.ones(1))", "rank 0 waited in a reduction in vain: "),
        ("all_gather(torch.ones(1))", "rank 0 waited in a gather in vain: "),
        ("collectives.gather_objects(1)", "rank 0 waited in an exchange in vain: "),
    ],
)
def test_a_rank_that_has_died_is_told_of_in_a_sentence(tmp_path, call, sentence):
    script = tmp_path / "left.py"
    script.write_text(_LEFT.format(call=call))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert sentence in done.stdout, done.stderr
    assert "a rank that has died or left tells why in its own output" in done.stdout
