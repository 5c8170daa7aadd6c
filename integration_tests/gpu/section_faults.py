"""What goes wrong on a device, and that it ends in a sentence: out of memory, a NaN, a dead rank, a hung collective."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from cases import Case, Failed, Machine, started
from loops import Ours, Raw
from ranks import run_ranks
from section_contract import kit
from torch import nn

TOO_MANY_BYTES, RANK_SECONDS = 2**50, 150
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def cases() -> list[Case]:
    """List the cases, in order of worth."""
    of = functools.partial
    return [
        *(Case(f"out of memory in forward, {name}", of(out_of_memory, name, "forward"), 5) for name in ("fsdp", "ddp")),
        *(Case(f"out of memory in backward, {name}", of(out_of_memory, name, "back"), 5) for name in ("fsdp", "ddp")),
        Case("rank killed", of(ends, "killed", 2, "peer|closed|reset"), 30),
        Case("NaN", not_a_number, 30),
        Case("illegal index", of(ends, "illegal", 1, "device-side assert|out of range"), 25),
        Case("rank that does not come, gloo", of(ends, "hung", 2, "timeout|timed out|did not"), 40),
        Case("hung NCCL collective", of(ends, "hung", 1, "timeout|timed out"), RANK_SECONDS),
    ]


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))


def out_of_memory(name: str, at: str, machine: Machine) -> dict[str, Any]:
    """Run out of memory in a step, go on with a smaller batch, and end where plain PyTorch does without it."""
    good, model, sentence = torch.ones(4, 16, device=machine.device), small(), "no error"

    def ask(*_: Any) -> None:
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=machine.device)

    def greedy(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        ask() if at == "forward" else output.register_hook(ask)

    with started(name, machine, **({"unit_bytes": 1} if name == "fsdp" else {})) as strategy:
        loop = Ours(strategy, model, SGD)
        loop.step(good)
        hook = model[0].register_forward_hook(greedy)
        try:
            loop.step(good.repeat(2, 1))
        except (RuntimeError, MemoryError) as error:
            sentence = str(error).partition("\n")[0][:300]
        hook.remove()
        loop.optimizer.zero_grad()
        for _ in range(3):
            loop.step(good)
        weights = strategy.module_state_dict(loop.model)
    plain = Raw(small().to(machine.device), SGD)
    for _ in range(4):
        plain.step(good)
    apart = {key: (weights[key] - each.cpu()).abs().max().item() for key, each in plain.model.state_dict().items()}
    if "memory" not in sentence:
        raise Failed(f"running out of memory gives: {sentence}")
    if not max(apart.values()) < 1e-5:
        raise Failed("training does not go on as if nothing had happened", {"sentence": sentence, "apart": apart})
    return {"sentence": sentence}


def not_a_number(machine: Machine) -> dict[str, Any]:
    """Give the loop what is no number: clipping raises, or the scaler skips the step, as the kit promises."""
    return kit("fsdp", machine, "non_finite_norm_raises_everywhere", "overflow_skips_the_step_everywhere")


def ends(mode: str, ranks: int, words: str, machine: Machine) -> dict[str, Any]:
    """Let something go wrong on hosts that share a device; rank 0 has to end by itself, with an error that names it."""
    if (mode, ranks) == ("hung", 1):
        machine.need_cuda("a kernel that does not end")
    began = time.monotonic()
    code, text = run_ranks(mode, ranks, machine, RANK_SECONDS, hosts=ranks, shared=True)
    lines = [line[:300] for line in text.splitlines() if any(word in line.lower() for word in words.split("|"))]
    figures = {"exit": code, "seconds": round(time.monotonic() - began, 1), "says": lines[:2]}
    if not code or not lines:
        last = " ".join(text.strip().splitlines()[-1:])
        raise Failed(f"rank 0 ended with {code} within {RANK_SECONDS} s, and its last line is: {last[:300]}", figures)
    return figures
