"""What the tests of the launcher run on ranks; new processes import it by name."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def total(value):
    """Add the ranks up; return a tensor and what the rank finds around itself."""
    dist.init_process_group("gloo")
    tensor = torch.full((1000,), float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return {"tensor": tensor, "threads": os.environ["OMP_NUM_THREADS"], "rank": int(os.environ["RANK"])}


def fall(how, folder):
    """Fail on rank 1 while the others wait for it in a collective."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 1:
        Path(folder, "fell").write_text(str(time.time()))
        if how == "raise":
            raise ValueError("the batch is empty")
        if how == "exit":
            sys.exit(3)
        if how == "vanish":
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    # A handler of its own that a rank in a collective never comes to run.
    signal.signal(signal.SIGTERM, lambda *_: print("stopping"))
    dist.all_reduce(torch.ones(1))


def give_back(what):
    """Return something; rank 0 alone has to be able to send it."""
    if os.environ["RANK"] == "0" and what == "lock":
        return threading.Lock()
    if os.environ["RANK"] == "1":
        return threading.Lock()
    if what == "exit":
        sys.exit(0)
    return what


def wait_for_ever(folder):
    """Hang in a collective that never ends, as a rank whose peer is stuck."""
    dist.init_process_group("gloo")
    Path(folder, f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    time.sleep(600)


def part():
    """Meet, then leave early on one rank while the other takes its time."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(6)
    return dist.get_rank()


def leave_early(rank, how):
    """Leave on one rank without an error while the other waits for it in a collective."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() != rank:
        dist.all_reduce(torch.ones(1))
    elif how == "exit":
        sys.exit(0)
