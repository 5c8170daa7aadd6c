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
import gc
import json
import math
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from cases import Case, Failed, Machine
from llama_loops import BILLION, SMALL, TINY, Kind, Ours, Raw, Size, llama, need_llama, tokens
from torch.profiler import ProfilerActivity, profile

from shard_core import get_strategy

BOUND = 1.02
PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}
SYNCHRONISATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
PROFILED_STEPS = 20


def cases(machine: Machine) -> list[Case]:
    """List the cases, in order of worth."""
    del machine
    fsdp, ddp, tp = Kind("fsdp"), Kind("ddp"), Kind("tp", options={"tensor_parallel_size": 1})
    offload = Kind("fsdp_cpu_offload")
    of = functools.partial
    return [
        Case("fsdp bf16-mixed", of(compare, Kind("fsdp"), BILLION), 45),
        Case("ddp bf16-mixed", of(compare, ddp, BILLION), 40),
        Case("fsdp kernels and synchronisations", of(traces, fsdp), 30),
        Case("ddp kernels and synchronisations", of(traces, ddp), 25),
        Case("fsdp with clipping", of(compare, Kind("fsdp", clip=True), BILLION), 40),
        Case("fsdp checkpointed", of(compare, Kind("fsdp", recomputed=True), BILLION), 45),
        Case("ddp checkpointed", of(compare, Kind("ddp", recomputed=True), BILLION), 45),
        Case("fsdp compiled", of(compare, Kind("fsdp", compiled=True), BILLION), 75),
        Case("ddp compiled", of(compare, Kind("ddp", compiled=True), BILLION), 75),
        Case("tp bf16-mixed", of(compare, tp, BILLION), 45),
        Case("fsdp_cpu_offload bf16-mixed", of(compare, offload, BILLION, steps=1, rounds=7), 90),
        Case("fsdp bf16-true", of(compare, Kind("fsdp", precision="bf16-true"), BILLION), 40),
        Case("ddp bf16-true", of(compare, Kind("ddp", precision="bf16-true"), BILLION), 40),
        Case("fsdp 64 MiB, small blocks", of(compare, fsdp, SMALL), 30),
        Case("fsdp per block, small blocks", of(compare, Kind("fsdp", unit_bytes=1), SMALL), 30),
        Case("fsdp units: 64 MiB against per block", units, 30),
    ]


@contextlib.contextmanager
def started(kind: Kind, machine: Machine, **options: Any) -> Iterator[Any]:
    """Start a strategy in a world of one, over NCCL on a GPU; free what was held in it at the end."""
    strategy = get_strategy(
        kind.strategy, accelerator=machine.device, devices=1, **{**kind.strategy_options(), **options}
    )
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()
        torch.compiler.reset()
        free(machine)


def free(machine: Machine) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if machine.device == "cuda":
        torch.cuda.empty_cache()


def compare(kind: Kind, size: Size, machine: Machine, *, steps: int = 4, rounds: int = 15) -> dict[str, Any]:
    """Time ours against the loop by hand; fail where the interval's upper end is above the bound."""
    need_llama(kind)
    size, steps, rounds = (TINY, 1, 2) if machine.quick else (size, steps, rounds)
    with started(kind, machine) as strategy:
        raw = Raw(llama(size, machine.device), kind, machine.device)
        ours = Ours(strategy, llama(size, machine.device), kind)
        batch = tokens(size, machine.device)
        figures = race(lambda: raw.step(batch), lambda: ours.step(batch), machine, steps, rounds)
        weights = sum(each.numel() for each in raw.model.parameters())
        del raw, ours
    seconds = figures["ours_ms"] / 1000
    flops = 6 * (weights - size.vocabulary * size.width) + 6 * size.layers * size.sequence * size.width
    figures |= {"parameters": weights, "tokens_per_second": size.tokens / seconds, "steps": steps, "rounds": rounds}
    figures["model_teraflops"] = flops * size.tokens / seconds / 1e12
    name = torch.cuda.get_device_name() if machine.device == "cuda" else ""
    peak = next((value for part, value in PEAKS.items() if part in name), None)
    if peak:
        figures["utilisation"] = flops * size.tokens / seconds / peak
    judge(figures, machine)
    return figures


def judge(figures: Mapping[str, Any], machine: Machine) -> None:
    """Fail where ours costs too much, or does not train alike."""
    if not figures["losses_differ_by"] <= 1e-2:
        raise Failed(f"the losses of the two loops differ by {figures['losses_differ_by']:.1e}", figures)
    if machine.judges_time and figures["interval"][1] > BOUND:
        low, high = figures["interval"]
        text = f"a step takes {figures['ratio']:.3f} ({low:.3f} to {high:.3f}) of the loop by hand, allowed {BOUND}"
        raise Failed(text, figures)


def race(
    raw: Callable[[], torch.Tensor], ours: Callable[[], torch.Tensor], machine: Machine, steps: int, rounds: int
) -> dict[str, Any]:
    """Let two loops take turns; the ratio of a round is between neighbours in time."""
    loops = (raw, ours)
    for loop in loops:
        for _ in range(3):
            loop()
    pairs = []
    losses = [0.0, 0.0]
    for number in range(rounds):
        times = [0.0, 0.0]
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            machine.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                loss = loops[which]()
            machine.synchronize()
            times[which] = (time.perf_counter() - began) / steps
            losses[which] = loss.item()
        pairs.append(times)
    ratios = sorted(mine / theirs for theirs, mine in pairs)
    return {
        "raw_ms": statistics.median(theirs for theirs, _ in pairs) * 1000,
        "ours_ms": statistics.median(mine for _, mine in pairs) * 1000,
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "losses_differ_by": abs(losses[1] - losses[0]) / abs(losses[0]),
    }


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with 95 %, or all there is of fewer than six.

    Example:
        >>> interval([float(number) for number in range(1, 16)])
        (4.0, 12.0)
    """
    count, outside = len(ordered), 0
    for beyond in range(count // 2):
        outside += 2 * math.comb(count, beyond)
        if outside > 0.05 * 2**count:
            return ordered[max(beyond - 1, 0)], ordered[min(count - beyond, count - 1)]
    return ordered[0], ordered[-1]


def units(machine: Machine) -> dict[str, Any]:
    """Time our default units against one per block, where several blocks make a default one; nothing is judged."""
    need_llama(Kind("fsdp"))
    size = TINY if machine.quick else SMALL
    blocks, default = Kind("fsdp", unit_bytes=1), Kind("fsdp")
    with started(blocks, machine) as first, started(default, machine) as second:
        pair = [
            Ours(each, llama(size, machine.device), kind) for each, kind in ((first, blocks), (second, default))
        ]
        batch = tokens(size, machine.device)
        steps, rounds = (1, 2) if machine.quick else (10, 15)
        figures = race(lambda: pair[0].step(batch), lambda: pair[1].step(batch), machine, steps, rounds)
        pair.clear()
    return {"per_block_ms": figures.pop("raw_ms"), "default_ms": figures.pop("ours_ms"), **figures}


def traces(kind: Kind, machine: Machine) -> dict[str, Any]:
    """Compare kernels and host synchronisations of both loops; list what clipping and the rest add."""
    need_llama(kind)
    size, steps = (TINY, 2) if machine.quick else (SMALL, PROFILED_STEPS)
    batch, device = tokens(size, machine.device), machine.device
    found = {}
    with started(kind, machine) as strategy:
        raw = Raw(llama(size, device), kind, device)
        found["raw"] = trace(lambda: raw.step(batch), steps, machine)
        ours = Ours(strategy, llama(size, device), kind)
        found["ours"] = trace(lambda: ours.step(batch), steps, machine)
        found["denominator"] = trace(lambda: ours.step(batch, denominator=float(batch.numel())), steps, machine)
        del raw, ours
    variants = {"clipping": {"precision": kind.precision}, "scaler": {"precision": "16-mixed"}}
    for name, options in variants.items():
        with started(kind, machine, **options) as strategy:
            ours = Ours(strategy, llama(size, device), Kind(kind.strategy, clip=name == "clipping"))
            found[name] = trace(lambda: ours.step(batch), steps, machine)  # noqa: B023 - called at once
            del ours
    kernels = {name: each[0] for name, each in found.items()}
    waits = {name: dict(each[1]) for name, each in found.items()}
    names = sorted({*kernels["raw"], *kernels["ours"]})
    apart = {each: [kernels["raw"][each], kernels["ours"][each]] for each in names}
    apart = {each: counts for each, counts in apart.items() if counts[0] != counts[1]}
    figures = {"steps": steps, "kernels": {name: each.total() for name, each in kernels.items()}}
    figures |= {"kernels_apart_raw_ours": apart, "synchronisations": waits}
    if machine.device == "cuda":
        more = {each: counts for each, counts in apart.items() if counts[1] > counts[0]}
        waited = sum(waits["ours"].values()) - sum(waits["raw"].values())
        if waited > 0:
            raise Failed(f"in {steps} steps the host waits {waited} times more than in the loop by hand", figures)
        if more:
            raise Failed(f"{len(more)} kernels are issued more often than by hand, first {min(more)[:80]}", figures)
    return figures


def trace(step: Callable[[], Any], steps: int, machine: Machine) -> tuple[Counter[str], Counter[str]]:
    """Profile steps; count kernels by name (on a CPU: operations), and what makes the host wait."""
    for _ in range(3):
        step()
    machine.synchronize()
    on_gpu = machine.device == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step()
            machine.synchronize()
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kernels = Counter(str(each["name"]) for each in events if each.get("cat") == ("kernel" if on_gpu else "cpu_op"))
    waits = Counter(
        str(each["name"])
        for each in events
        if (each.get("cat") in ("cuda_runtime", "cuda_driver") and each["name"] in SYNCHRONISATIONS)
        # A copy of pageable memory returns when it is done, whatever it was asked for.
        or (each.get("cat") == "gpu_memcpy" and "Pageable" in each["name"])
    )
    return kernels, waits
