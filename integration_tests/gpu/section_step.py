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
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cases import Case, Failed, Machine
from loops import BILLION, SMALL, TINY, Kind, Size, started, tokens
from torch.profiler import ProfilerActivity, profile

Step = Callable[[], torch.Tensor]
BOUND, LOSSES_APART, PROFILED_STEPS = 1.02, 1e-2, 20
PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def cases() -> list[Case]:
    """List the cases, in order of worth."""

    def pair(name: str, seconds: float, strategy: str, size: Size = BILLION, **options: Any) -> Case:
        steps: Any = {"rounds": 15} if strategy == "fsdp_cpu_offload" else {}  # the CPU's part makes noise
        steps = {"steps": 4, "rounds": 15} if size is SMALL else steps
        return Case(name, functools.partial(compare, Kind(strategy, **options), size, **steps), seconds)

    def traced(strategy: str) -> Case:
        return Case(f"{strategy} kernels and waits", functools.partial(traces, Kind(strategy)), 30)

    return [
        pair("fsdp bf16-mixed", 40, "fsdp"),
        pair("ddp bf16-mixed", 35, "ddp"),
        pair("fsdp, small blocks", 25, "fsdp", SMALL),
        traced("fsdp"),
        traced("ddp"),
        pair("fsdp with clipping", 35, "fsdp", clip=True),
        pair("fsdp checkpointed", 40, "fsdp", recomputed=True),
        pair("ddp checkpointed", 40, "ddp", recomputed=True),
        pair("fsdp compiled", 70, "fsdp", compiled=True),
        pair("ddp compiled", 70, "ddp", compiled=True),
        pair("tp bf16-mixed", 40, "tp"),
        pair("fsdp_cpu_offload bf16-mixed", 90, "fsdp_cpu_offload"),
        pair("fsdp bf16-true", 35, "fsdp", precision="bf16-true"),
        pair("ddp bf16-true", 35, "ddp", precision="bf16-true"),
        pair("fsdp per block, small blocks", 25, "fsdp", SMALL, unit_bytes=1),
        Case("fsdp units: 64 MiB against per block", units, 25),
    ]


def compare(kind: Kind, size: Size, machine: Machine, *, steps: int = 2, rounds: int = 9) -> dict[str, Any]:
    """Time ours against the loop by hand; fail where it costs more than the bound, or trains otherwise."""
    kind.check()
    size, steps, rounds = (TINY, 1, 2) if machine.quick else (size, steps, rounds)
    with started(kind.strategy, machine, **kind.options()) as strategy:
        figures = _pair(kind, size, machine, strategy, steps, rounds)
    if kind.compiled:
        torch.compiler.reset()
    per_second = size.batch * size.sequence / figures["ours_ms"] * 1000
    products = figures["parameters"] - size.vocabulary * size.width
    flops = (6 * products + 6 * size.layers * size.sequence * size.width) * per_second
    figures |= {"tokens_per_second": per_second, "model_teraflops": flops / 1e12, "steps": steps, "rounds": rounds}
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


def _pair(kind: Kind, size: Size, machine: Machine, strategy: Any, steps: int, rounds: int) -> dict[str, Any]:
    raw, ours, batch = kind.raw(size, machine), kind.ours(strategy, size, machine), tokens(size, machine)
    figures = race(lambda: raw.step(**batch), lambda: ours.step(**batch), machine, steps, rounds)
    return figures | {"parameters": sum(each.numel() for each in raw.model.parameters())}


def race(raw: Step, ours: Step, machine: Machine, steps: int, rounds: int) -> dict[str, Any]:
    """Let two loops take turns; the ratio of a round is between neighbours in time."""
    loops, pairs, losses = (raw, ours), [], [0.0, 0.0]
    for loop in loops:
        for _ in range(3):
            loop()
    for number in range(rounds):
        times = [0.0, 0.0]
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            machine.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                loss = loops[which]()
            machine.synchronize()
            times[which] = (time.perf_counter() - began) / steps * 1000
            # Later on both know the one batch by heart, and rounding decides.
            losses[which] = losses[which] or loss.item()
        pairs.append(times)
    ratios = sorted(mine / theirs for theirs, mine in pairs)
    theirs, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
    apart = abs(losses[1] - losses[0]) / abs(losses[0])
    return {
        "raw_ms": theirs,
        "ours_ms": mine,
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "losses_apart": apart,
    }


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with 95 %, or all there is of fewer than six."""
    count, outside, beyond = len(ordered), 0, 0
    while beyond < count // 2:
        outside += 2 * math.comb(count, beyond)
        if outside > 0.05 * 2**count:
            break
        beyond += 1
    place = max(beyond - 1, 0)
    return ordered[place], ordered[-1 - place]


def units(machine: Machine) -> dict[str, Any]:
    """Time our default units against one per block, where several blocks make a default one; nothing is judged."""
    kinds = Kind("fsdp", unit_bytes=1), Kind("fsdp")
    kinds[0].check()
    size, steps, rounds = (TINY, 1, 2) if machine.quick else (SMALL, 10, 15)
    with contextlib.ExitStack() as stack:
        both = [stack.enter_context(started("fsdp", machine, **kind.options())) for kind in kinds]
        blocks, default = (kind.ours(each, size, machine) for kind, each in zip(kinds, both, strict=True))
        batch = tokens(size, machine)
        figures = race(lambda: blocks.step(**batch), lambda: default.step(**batch), machine, steps, rounds)
    return {"per_block_ms": figures.pop("raw_ms"), "default_ms": figures.pop("ours_ms"), **figures}


def traces(kind: Kind, machine: Machine) -> dict[str, Any]:
    """Compare kernels and what makes the host wait in both loops; list what clipping and the rest add."""
    kind.check()
    size, steps = (TINY, 2) if machine.quick else (SMALL, PROFILED_STEPS)
    batch = tokens(size, machine)
    found = {}
    with started(kind.strategy, machine, **kind.options()) as strategy:
        raw = kind.raw(size, machine)
        found["raw"] = trace(lambda: raw.step(**batch), steps, machine)
        ours = kind.ours(strategy, size, machine)
        found["ours"] = trace(lambda: ours.step(**batch), steps, machine)
        found["denominator"] = trace(lambda: ours.step(**batch, denominator=7.0), steps, machine)
    for name, other in (("clipping", Kind(kind.strategy, clip=True)), ("scaler", Kind(kind.strategy, "16-mixed"))):
        with started(kind.strategy, machine, **other.options()) as strategy:
            loop = other.ours(strategy, size, machine)
            found[name] = trace(functools.partial(loop.step, **batch), steps, machine)
    kernels, waits = ({name: each[which] for name, each in found.items()} for which in (0, 1))
    both = {each: [kernels["raw"][each], kernels["ours"][each]] for each in sorted(kernels["raw"] | kernels["ours"])}
    apart = {each: counts for each, counts in both.items() if counts[0] != counts[1]}
    more = [each for each, (theirs, mine) in apart.items() if mine > theirs]
    figures: dict[str, Any] = {"steps": steps, "kernels": {name: each.total() for name, each in kernels.items()}}
    figures |= {"kernels_apart_raw_ours": apart, "waits": {name: dict(each) for name, each in waits.items()}}
    waited = waits["ours"].total() - waits["raw"].total()
    if machine.judges and waited > 0:
        raise Failed(f"in {steps} steps the host waits {waited} times more than in the loop by hand", figures)
    if machine.judges and more:
        raise Failed(f"{len(more)} kernels are issued more often than by hand, such as {more[0][:80]}", figures)
    return figures


def trace(step: Step, steps: int, machine: Machine) -> tuple[Counter[str], Counter[str]]:
    """Profile steps; count kernels by name (on a CPU: operations), and what makes the host wait."""
    for _ in range(3):
        step()
    on_gpu = machine.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step()
            machine.synchronize()
        profiler.export_chrome_trace(str(path))
        events = [(each.get("cat"), str(each.get("name"))) for each in json.loads(path.read_text())["traceEvents"]]
    kernels = Counter(name for category, name in events if category == ("kernel" if on_gpu else "cpu_op"))
    # A copy of pageable memory returns when it is done, whatever it was asked for.
    blocking = (
        name
        for category, name in events
        if (category == "cuda_runtime" and name in WAITS) or (category == "gpu_memcpy" and "Pageable" in name)
    )
    return kernels, Counter(blocking)
