"""What a step costs beside a hand-written loop of the same engine and layout, and what both ask of the device.

Model FLOPs utilisation is ``FLOPs per token * tokens per second / peak``, where FLOPs per token are
``6 * N + 6 * layers * sequence * width``: N counts the weights that enter a matrix product (all but the input
embedding), forward once and backward twice, two operations each; the second term is causal attention, half of the
``12 * layers * sequence * width`` of a full one. What checkpointing computes again does not count. The peak is the
vendor's for dense bfloat16, where the device is in the table.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from cases import Case, Failed, Machine, Skipped, started
from llama_loops import BILLION, SMALL, TINY, Kind, Size
from loops import race
from traces import kernels, trace, waits

Step = Callable[[], torch.Tensor]
BOUND, LOSSES_APART, PROFILED_STEPS = 1.02, 1e-2, 20
PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}


def cases() -> list[Case]:
    """List the cases, in order of worth."""

    def pair(name: str, seconds: float, strategy: str, size: Size = BILLION, **options: Any) -> Case:
        steps = 4 if size is SMALL else 2
        rounds = 15 if size is SMALL or strategy == "fsdp_cpu_offload" else 9  # the CPU's part makes noise
        return Case(name, functools.partial(compare, Kind(strategy, **options), size, steps, rounds), seconds)

    def traced(strategy: str) -> Case:
        return Case(f"{strategy} kernels and waits", functools.partial(traces, Kind(strategy)), 30)

    return [
        *(pair("fsdp bf16-mixed", 40, "fsdp"), pair("ddp bf16-mixed", 35, "ddp")),
        *(pair("fsdp, small blocks", 25, "fsdp", SMALL), traced("fsdp"), traced("ddp")),
        pair("fsdp with clipping", 35, "fsdp", clip=True),
        *(pair(f"{name} checkpointed", 40, name, recomputed=True) for name in ("fsdp", "ddp")),
        *(pair(f"{name} compiled", 70, name, compiled=True) for name in ("fsdp", "ddp")),
        *(pair("tp bf16-mixed", 40, "tp"), pair("fsdp_cpu_offload bf16-mixed", 90, "fsdp_cpu_offload")),
        *(pair(f"{name} bf16-true", 35, name, precision="bf16-true") for name in ("fsdp", "ddp")),
        pair("fsdp per block, small blocks", 25, "fsdp", SMALL, unit_bytes=1),
        Case("fsdp units: 64 MiB against per block", units, 25),
    ]


def begun(kind: Kind, machine: Machine) -> contextlib.AbstractContextManager[Any]:
    if kind.lacks:
        raise Skipped(kind.lacks)
    return started(kind.strategy, machine, **kind.options())


def compare(kind: Kind, size: Size, steps: int, rounds: int, machine: Machine) -> dict[str, Any]:
    """Time ours against the loop by hand; fail where it costs more than the bound, or trains otherwise."""
    size, steps, rounds = (TINY, 1, 2) if machine.quick else (size, steps, rounds)
    with begun(kind, machine) as strategy:
        raw, ours, batch = kind.raw(size, machine.device), kind.ours(strategy, size), size.tokens(machine.device)
        count = sum(each.numel() for each in raw.model.parameters())
        figures = timed(lambda: raw.step(**batch), lambda: ours.step(**batch), machine, steps, rounds)
    per_second = size.batch * size.sequence / figures["ours_ms"] * 1000
    flops = (6 * (count - size.vocabulary * size.width) + 6 * size.layers * size.sequence * size.width) * per_second
    figures |= {"parameters": count, "tokens_per_second": per_second, "model_teraflops": flops / 1e12}
    figures |= {"steps": steps, "rounds": rounds}
    name = torch.cuda.get_device_name() if machine.device == "cuda" else ""
    peak = next((value for part, value in PEAKS.items() if part in name), None)
    figures |= {"utilisation": flops / peak} if peak else {}
    low, high = figures["interval"]
    if not figures["losses_apart"] <= LOSSES_APART:
        raise Failed(f"the losses of the two loops are {figures['losses_apart']:.1e} apart", figures)
    if machine.judges and size is BILLION and high > BOUND:  # of less, the host's noise is the most
        times = f"{figures['ratio']:.3f} ({low:.3f} to {high:.3f})"
        raise Failed(f"a step takes {times} times that of the loop by hand, allowed {BOUND}", figures)
    return figures


def timed(raw: Step, ours: Step, machine: Machine, steps: int, rounds: int) -> dict[str, Any]:
    """Race two loops, and compare the losses of their first round: later both know the one batch by heart."""
    losses: dict[Step, float] = {}

    def turn(loop: Step) -> float:
        machine.synchronize()
        began = time.perf_counter()
        for _ in range(steps):
            loss = loop()
        machine.synchronize()
        milliseconds = (time.perf_counter() - began) / steps * 1000
        losses.setdefault(loop, loss.item())
        return milliseconds

    for loop in (raw, ours):
        for _ in range(3):
            loop()
    figures = race(functools.partial(turn, raw), functools.partial(turn, ours), rounds)
    return figures | {"losses_apart": abs(losses[ours] - losses[raw]) / abs(losses[raw])}


def units(machine: Machine) -> dict[str, Any]:
    """Time our default units against one per block, where several blocks make a default one; nothing is judged."""
    kinds = Kind("fsdp", unit_bytes=1), Kind("fsdp")
    size, steps, rounds = (TINY, 1, 2) if machine.quick else (SMALL, 10, 15)
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(begun(kind, machine)) for kind in kinds]
        blocks, default = (kind.ours(each, size) for kind, each in zip(kinds, both, strict=True))
        batch = size.tokens(machine.device)
        figures = timed(lambda: blocks.step(**batch), lambda: default.step(**batch), machine, steps, rounds)
    return {"per_block_ms": figures.pop("raw_ms"), "default_ms": figures.pop("ours_ms"), **figures}


def traces(kind: Kind, machine: Machine) -> dict[str, Any]:
    """Compare kernels and what makes the host wait in both loops; list what clipping and the rest add."""
    size, steps = (TINY, 2) if machine.quick else (SMALL, PROFILED_STEPS)
    others = {"clipping": Kind(kind.strategy, clip=True), "scaler": Kind(kind.strategy, "16-mixed")}
    batch, events = size.tokens(machine.device), {}
    with begun(kind, machine) as strategy:
        raw = kind.raw(size, machine.device)
        events["raw"] = trace(lambda: raw.step(**batch), steps, machine.device)
        ours = kind.ours(strategy, size)
        events["ours"] = trace(lambda: ours.step(**batch), steps, machine.device)
        events["denominator"] = trace(lambda: ours.step(**batch, denominator=7.0), steps, machine.device)
    for name, other in others.items():
        with begun(other, machine) as strategy:
            loop = other.ours(strategy, size)
            events[name] = trace(functools.partial(loop.step, **batch), steps, machine.device)
    issued = {name: kernels(each, machine.device) for name, each in events.items()}
    waited = {name: waits(each) for name, each in events.items()}
    both = {each: [issued["raw"][each], issued["ours"][each]] for each in sorted(issued["raw"] | issued["ours"])}
    apart = {each: counts for each, counts in both.items() if counts[0] != counts[1]}
    more = [each for each, (theirs, mine) in apart.items() if mine > theirs]
    figures: dict[str, Any] = {"steps": steps, "kernels": {name: each.total() for name, each in issued.items()}}
    figures |= {"kernels_apart_raw_ours": apart, "waits": {name: dict(each) for name, each in waited.items()}}
    later = waited["ours"].total() - waited["raw"].total()
    if machine.judges and later > 0:
        raise Failed(f"in {steps} steps the host waits {later} times more than in the loop by hand", figures)
    if machine.judges and more:
        raise Failed(f"{len(more)} kernels are issued more often than by hand, such as {more[0][:80]}", figures)
    return figures
