"""What a rank is told by the collectives over the host when another has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LEFT = """\
import os, sys

import torch
import torch.distributed as dist

from shard_core.errors import CollectiveError
from shard_xla.collectives import AllGather, ReduceScatter

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    os._exit(0)
scatter = ReduceScatter(0)
scatter(torch.ones(2), print)
for call in (lambda: AllGather(list)([torch.ones(2)]), scatter.flush):
    try:
        call()
    except CollectiveError as error:
        sys.stdout.write(f"{error}\\n")
sys.stdout.flush()
os._exit(0)  # to leave in order takes both ranks
"""


def test_a_rank_that_has_left_is_told_of_in_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    script.write_text(_LEFT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert "rank 0 waited in a gather of parameters in vain: " in done.stdout, done.stderr
    assert "rank 0 waited in a reduction of gradients in vain: " in done.stdout, done.stderr
