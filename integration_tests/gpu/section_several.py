"""What needs several GPUs: overlap, scaling, an abort, copies and tensor parallelism across hosts."""

from __future__ import annotations

from typing import Any

import torch
from cases import Case, Machine, Skipped


def cases() -> list[Case]:
    """List the cases, in order of worth."""
    return [Case(name, _lacking, 1) for name in ("scaling", "overlap", "NCCL abort", "hsdp", "tp of two ranks")]


def _lacking(machine: Machine) -> dict[str, Any]:
    here = torch.cuda.device_count() if machine.device == "cuda" else 0
    raise Skipped(f"needs two GPUs, {here} here" if here < 2 else f"is not written yet; {here} GPUs here")
