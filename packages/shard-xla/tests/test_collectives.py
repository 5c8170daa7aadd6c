"""The error of the host's collectives when another rank has left, and from where XLA's own group carries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LEFT = """\
import os, sys

import torch
import torch.distributed as dist

from shard_core import CollectiveError
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


def test_a_rank_that_has_left_is_named_in_a_sentence(tmp_path: Path) -> None:
    script = tmp_path / "left.py"
    script.write_text(_LEFT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert "rank 0 waited in a gather of parameters in vain: " in done.stdout, done.stderr
    assert "rank 0 waited in a reduction of gradients in vain: " in done.stdout, done.stderr


_NOT_FROM_HOST = """\
import contextlib, sys

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.distributed.xla_backend

from shard_core.backend import ProcessGroupCollectives, carrying_device
from shard_core import CollectiveError

dist.init_process_group("xla", init_method="xla://")
collectives, own = ProcessGroupCollectives(), torch_xla.device()
with contextlib.suppress(CollectiveError):  # torch hands no objects out over this group
    collectives.connect(0, 1, own)
mine = torch.ones(2, requires_grad=True)
gathered = collectives.all_gather(mine, sync_grads=True)
gathered.mul(3.0).sum().backward()
alone = collectives.all_gather(mine)
places = [carrying_device(torch.device(each), None, own) for each in ("cpu", "xla:0")]
sys.stdout.write(f"{gathered.tolist()} {gathered.device} {mine.grad.tolist()} {alone.tolist()} {places}\\n")
"""


def test_a_group_that_carries_nothing_from_host_memory_gathers_from_the_device(tmp_path: Path) -> None:
    script = tmp_path / "gather.py"
    script.write_text(_NOT_FROM_HOST)
    environment = {**os.environ, "PJRT_DEVICE": "CPU"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    xla = "device(type='xla', index=0)"
    assert f"[[1.0, 1.0]] cpu [3.0, 3.0] [[1.0, 1.0]] [{xla}, {xla}]" in done.stdout, done.stderr
