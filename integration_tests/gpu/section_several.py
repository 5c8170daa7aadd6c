"""What needs several GPUs: overlap, scaling, an abort, copies and tensor parallelism across hosts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from cases import Case, Machine, Skipped

_NAMES = ("scaling of fsdp", "overlap", "NCCL abort", "hsdp", "tp of two ranks")


def cases(machine: Machine) -> list[Case]:
    """List the cases, in order of worth."""
    del machine
    return [Case(name, functools.partial(_lacking, 2), 1) for name in _NAMES]


def _lacking(gpus: int, machine: Machine) -> dict[str, Any]:
    here = torch.cuda.device_count() if machine.device == "cuda" else 0
    if here < gpus:
        raise Skipped(f"needs two GPUs, {here} here")
    raise Skipped(f"is not written yet; {here} GPUs here")
