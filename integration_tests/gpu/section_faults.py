"""What goes wrong on a device, and that it ends in a sentence: out of memory, a NaN, a dead rank, a hung collective."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from cases import Case, Failed, Machine
from rank_script import run_ranks
from section_step import free
from torch import nn

from shard_core import get_strategy
from shard_core.errors import NonFiniteGradient

TOO_MANY_BYTES = 2**50


def cases(machine: Machine) -> list[Case]:
    """List the cases, in order of worth."""
    del machine
    of = functools.partial
    return [
        Case("out of memory in forward, fsdp", of(out_of_memory, "fsdp", False), 5),
        Case("out of memory in backward, fsdp", of(out_of_memory, "fsdp", True), 5),
        Case("out of memory in forward, ddp", of(out_of_memory, "ddp", False), 5),
        Case("out of memory in backward, ddp", of(out_of_memory, "ddp", True), 5),
        Case("hung NCCL collective", of(ends, "hung", 1, "timeout|timed out"), 40),
        Case("rank killed", of(ends, "killed", 2, "rank|peer|closed|reset"), 30),
        Case("NaN, bf16-mixed", of(not_a_number, "bf16-mixed"), 4),
        Case("NaN, 16-mixed", of(not_a_number, "16-mixed"), 4),
        Case("illegal index", of(ends, "illegal", 1, "device-side assert|out of range"), 25),
        Case("rank that does not come, gloo", of(ends, "hung", 2, "timeout|timed out|did not"), 40),
    ]


class Greedy(torch.autograd.Function):
    """Asks for more memory than there is, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, later: bool) -> torch.Tensor:
        if not later:
            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=inputs.device)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.empty(TOO_MANY_BYTES, dtype=torch.uint8, device=gradients[0].device)


class Hungry(nn.Module):
    """Two layers, between which memory runs out when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.later: bool | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        inputs = self.blocks[0](inputs)
        if self.later is not None:
            inputs = Greedy.apply(inputs, self.later)
        outputs: torch.Tensor = self.blocks[1](inputs)
        return outputs.square().mean()


def _model() -> tuple[Hungry, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Hungry()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def out_of_memory(name: str, later: bool, machine: Machine) -> dict[str, Any]:
    """Run out of memory in a step, go on with a smaller batch, and end where plain PyTorch does without it."""
    good = torch.ones(4, 16, device=machine.device)
    options = {"unit_bytes": 1} if name == "fsdp" else {}
    strategy = get_strategy(name, accelerator=machine.device, devices=1, **options)
    with strategy:
        strategy.setup_environment()
        inner, optimizer = _model()
        module, (optimizer,) = strategy.setup_module_and_optimizers(inner, [optimizer])

        def step(batch: torch.Tensor) -> None:
            strategy.backward(module(batch), module)
            strategy.optimizer_step(optimizer)
            optimizer.zero_grad()

        sentence = ""
        for number in range(4):
            step(good)
            if number == 1:
                inner.later = later
                sentence = _raised(functools.partial(step, good.repeat(2, 1)))
                inner.later = None
                optimizer.zero_grad()
        weights = strategy.module_state_dict(module)
    free(machine)
    plain, optimizer = _model()
    plain.to(machine.device)
    for _ in range(4):
        plain(good).backward()
        optimizer.step()
        optimizer.zero_grad()
    figures = {"sentence": sentence}
    if "memory" not in sentence:
        raise Failed(f"running out of memory gives: {sentence or 'no error'}", figures)
    for key, value in plain.state_dict().items():
        if not torch.allclose(weights[key], value.cpu(), rtol=1e-5, atol=1e-6):
            raise Failed(f"after it, training does not go on as if nothing had happened: {key} differs", figures)
    return figures


def _raised(step: Callable[[], None]) -> str:
    try:
        step()
    except (RuntimeError, MemoryError) as error:
        return str(error).partition("\n")[0][:300]
    return ""


def not_a_number(precision: str, machine: Machine) -> dict[str, Any]:
    """Give the loop a NaN: the step is refused with an error, or skipped under a scaler, and weights stay."""
    strategy = get_strategy("fsdp", accelerator=machine.device, devices=1, precision=precision)
    with strategy:
        strategy.setup_environment()
        module, optimizer = _model()
        model: Any
        model, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
        before = strategy.module_state_dict(model)
        strategy.backward(model(torch.full((2, 16), float("nan"), device=machine.device)), model)
        sentence, stepped = "", None
        try:
            strategy.clip_gradients_norm(model, optimizer, 1.0)
            stepped = strategy.optimizer_step(optimizer)
        except NonFiniteGradient as error:
            sentence = str(error)
        after = strategy.module_state_dict(model)
    free(machine)
    figures = {"sentence": sentence, "stepped": stepped}
    if not sentence and stepped is not False:
        raise Failed("a NaN was stepped with", figures)
    if any(not torch.equal(before[key], after[key]) for key in before):
        raise Failed("a NaN changed the weights", figures)
    return figures


def ends(mode: str, ranks: int, words: str, machine: Machine) -> dict[str, Any]:
    """Let something go wrong in processes; rank 0 has to end by itself, with an error that names it."""
    if mode == "hung" and ranks == 1:
        machine.need_cuda("a kernel that does not end")
    began = time.monotonic()
    (code, text), *_ = run_ranks(mode, ranks, machine.device, 60)
    lines = [line for line in text.splitlines() if any(word in line.lower() for word in words.split("|"))]
    figures = {"exit": code, "seconds": round(time.monotonic() - began, 1), "says": [line[:300] for line in lines[-2:]]}
    if code is None:
        raise Failed("rank 0 was still there after 60 s", figures)
    if code == 0:
        raise Failed("rank 0 ended as if nothing had happened", figures)
    if not lines:
        last = text.strip().splitlines()[-1:]
        raise Failed(f"rank 0 ended with {code} and does not say why: {last}", figures)
    return figures
