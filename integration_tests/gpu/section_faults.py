"""What goes wrong on a device, and that it ends in a sentence: out of memory, a NaN, a dead rank, a hung collective."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from cases import Case, Failed, Machine
from loops import Ours, Raw, started
from rank_script import run_ranks
from torch import nn

from shard_core.errors import NonFiniteGradient

TOO_MANY_BYTES, RANK_SECONDS = 2**50, 150
SGD = functools.partial(torch.optim.SGD, lr=0.1)


def cases() -> list[Case]:
    """List the cases, in order of worth."""
    of = functools.partial
    return [
        *(Case(f"out of memory in forward, {name}", of(out_of_memory, name, False), 5) for name in ("fsdp", "ddp")),
        *(Case(f"out of memory in backward, {name}", of(out_of_memory, name, True), 5) for name in ("fsdp", "ddp")),
        Case("rank killed", of(ends, "killed", 2, "peer|closed|reset"), 30),
        *(Case(f"NaN, {name}", of(not_a_number, name), 4) for name in ("bf16-mixed", "16-mixed")),
        Case("illegal index", of(ends, "illegal", 1, "device-side assert|out of range"), 25),
        Case("rank that does not come, gloo", of(ends, "hung", 2, "timeout|timed out|did not"), 40),
        Case("hung NCCL collective", of(ends, "hung", 1, "timeout|timed out"), RANK_SECONDS),
    ]


class Greedy(torch.autograd.Function):
    """Asks for more memory than there is, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, later: bool) -> torch.Tensor:
        del ctx
        if not later:
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=inputs.device)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=gradients[0].device)


class Hungry(nn.Module):
    """Two layers, between which memory runs out when asked: False in forward, True in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.later: bool | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.blocks[0](inputs)
        if self.later is not None:
            ask: Any = Greedy
            inputs = ask.apply(inputs, self.later)
        outputs: torch.Tensor = self.blocks[1](inputs)
        return outputs.square().mean()


def out_of_memory(name: str, later: bool, machine: Machine) -> dict[str, Any]:
    """Run out of memory in a step, go on with a smaller batch, and end where plain PyTorch does without it."""
    good, sentence = torch.ones(4, 16, device=machine.device), "no error"
    torch.manual_seed(0)
    with started(name, machine, **({"unit_bytes": 1} if name == "fsdp" else {})) as strategy:
        model = Hungry()
        loop = Ours(strategy, model, SGD)
        loop.step(good)
        model.later = later
        try:
            loop.step(good.repeat(2, 1))
        except (RuntimeError, MemoryError) as error:
            sentence = str(error).partition("\n")[0][:300]
        model.later = None
        loop.optimizer.zero_grad()
        for _ in range(3):
            loop.step(good)
        weights = strategy.module_state_dict(loop.model)
    torch.manual_seed(0)
    plain = Raw(Hungry().to(machine.device), SGD)
    for _ in range(4):
        plain.step(good)
    if "memory" not in sentence:
        raise Failed(f"running out of memory gives: {sentence}")
    apart = {key: (weights[key] - each.cpu()).abs().max().item() for key, each in plain.model.state_dict().items()}
    if not max(apart.values()) < 1e-5:
        raise Failed("training does not go on as if nothing had happened", {"sentence": sentence, "apart": apart})
    return {"sentence": sentence}


def not_a_number(precision: str, machine: Machine) -> dict[str, Any]:
    """Give the loop a NaN: the step is refused with an error, or skipped under a scaler, and weights stay."""
    sentence, stepped = "", None
    with started("fsdp", machine, precision=precision) as strategy:
        loop = Ours(strategy, Hungry(), SGD)
        before = strategy.module_state_dict(loop.model)
        loss = loop.model(torch.full((2, 16), float("nan"), device=machine.device))
        strategy.backward(loss, loop.model)
        try:
            strategy.clip_gradients_norm(loop.model, loop.optimizer, 1.0)
            stepped = strategy.optimizer_step(loop.optimizer)
        except NonFiniteGradient as error:
            sentence = str(error)
        after = strategy.module_state_dict(loop.model)
    figures = {"sentence": sentence, "stepped": stepped}
    if (not sentence and stepped is not False) or any(not torch.equal(before[key], after[key]) for key in before):
        raise Failed("a NaN was stepped with, or has changed the weights", figures)
    return figures


def ends(mode: str, ranks: int, words: str, machine: Machine) -> dict[str, Any]:
    """Let something go wrong in processes; rank 0 has to end by itself, with an error that names it."""
    if (mode, ranks) == ("hung", 1):
        machine.need_cuda("a kernel that does not end")
    began = time.monotonic()
    (code, text), *_ = run_ranks(mode, ranks, machine.device, RANK_SECONDS)
    lines = [line[:300] for line in text.splitlines() if any(word in line.lower() for word in words.split("|"))]
    figures = {"exit": code, "seconds": round(time.monotonic() - began, 1), "says": lines[:2]}
    if code is None:
        raise Failed(f"rank 0 was still there after {RANK_SECONDS} s", figures)
    if code == 0 or not lines:
        last = " ".join(text.strip().splitlines()[-1:])
        raise Failed(f"rank 0 ended with {code} and does not say why: {last[:300]}", figures)
    return figures
