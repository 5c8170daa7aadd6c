"""What needs several GPUs: scaling and overlap, an abort of NCCL, copies and tensor parallelism across hosts."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from cases import Case, Failed, Machine
from ranks import run_ranks, train
from section_step import LOSSES_APART

SIZES, SECONDS, ENDS_WITHIN = (1, 2, 8), 150, 60


def cases() -> list[Case]:
    """List the cases, in order of worth."""
    of = functools.partial
    return [
        *(Case(f"scaling and overlap, {name}", of(scaling, name), 2 * SECONDS) for name in ("fsdp", "ddp")),
        Case("NCCL abort", aborted, ENDS_WITHIN),
        *(Case(f"{name} across two hosts", of(across, name), SECONDS) for name in ("hsdp", "tp")),
    ]


def ranks_of(machine: Machine, what: str) -> int:
    """Return how many ranks there can be: two on a CPU."""
    if machine.device == "cpu":
        return 2
    machine.need_cuda(what, 2)
    return torch.cuda.device_count()


def scaling(name: str, machine: Machine) -> dict[str, Any]:
    """Train on more and more ranks, each on as many tokens; report how time grows, and messages beside computing."""
    there = ranks_of(machine, "scaling")
    found = {ranks: train(ranks, machine, SECONDS, name) for ranks in SIZES if ranks <= there}
    figures: dict[str, Any] = {"ms": {ranks: each["ms"] for ranks, each in found.items()}}
    figures["efficiency"] = {ranks: found[1]["ms"] / each["ms"] for ranks, each in found.items()}
    figures["overlap"] = {ranks: each["overlap"] for ranks, each in found.items() if ranks > 1}
    return alike(list(found.values()), figures)


def across(name: str, machine: Machine) -> dict[str, Any]:
    """Train on two hosts, for each of which an agent of torchrun stands, as on one rank."""
    ranks = ranks_of(machine, f"{name} across two hosts") // 2 * 2
    one, both = train(1, machine, SECONDS, "fsdp"), train(ranks, machine, SECONDS, name, hosts=2)
    return alike([one, both], {"ranks": ranks, "ms": both["ms"], "overlap": both["overlap"]})


def alike(found: list[dict[str, Any]], figures: dict[str, Any]) -> dict[str, Any]:
    """Check that losses are those of the first: all ranks have the one batch."""
    pairs = [(one, other) for each in found for one, other in zip(found[0]["losses"], each["losses"], strict=True)]
    figures["losses_apart"] = max(abs(other - one) / abs(one) for one, other in pairs)
    if not figures["losses_apart"] <= LOSSES_APART:
        raise Failed(f"losses are {figures['losses_apart']:.1e} apart from those of one rank", figures)
    return figures


def aborted(machine: Machine) -> dict[str, Any]:
    """Let one rank raise while the others wait for it in a collective: all have to end, and long before a timeout."""
    ranks, began = ranks_of(machine, "an abort"), time.monotonic()
    code, text = run_ranks("raises", ranks, machine, ENDS_WITHIN)
    figures = {"ranks": ranks, "exit": code, "seconds": round(time.monotonic() - began, 1)}
    if not code or "ZeroDivisionError" not in text:
        raise Failed(f"one of {ranks} ranks raised, and the job ended with {code}", figures)
    return figures
