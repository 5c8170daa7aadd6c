"""What a profiler sees of some steps: kernels, what makes the host wait, and messages beside computing."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = dict[str, Any]
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
#: The category of what a device computes, and a word in the names of messages.
_COMPUTED = {"cuda": ("kernel", "nccl"), "cpu": ("cpu_op", "c10d")}


def trace(step: Callable[[], object], steps: int, device: str) -> list[Event]:
    """Profile steps and return the trace's events."""
    for _ in range(3):
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                step()
            if device == "cuda":
                torch.cuda.synchronize()
        profiler.export_chrome_trace(str(path))
        return list(json.loads(path.read_text())["traceEvents"])


def kernels(events: list[Event], device: str) -> Counter[str]:
    """Count kernels by name; on a CPU, operations."""
    return Counter(event["name"] for event in events if event.get("cat") == _COMPUTED[device][0])


def waits(events: list[Event]) -> Counter[str]:
    """Count what makes the host wait: a copy of pageable memory does until it is done, whatever was asked for."""
    named = [(event.get("cat"), str(event.get("name"))) for event in events]
    runtime = Counter(name for category, name in named if category == "cuda_runtime" and name in WAITS)
    return runtime + Counter(name for category, name in named if category == "gpu_memcpy" and "Pageable" in name)


def overlap(events: list[Event], device: str) -> float | None:
    """Return the share of the time of messages in which the device computes, too; None where none were sent."""
    category, mark = _COMPUTED[device]
    spans = [(mark in e["name"].lower(), e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == category]
    computed, sent, beside = sorted(span[1:] for span in spans if not span[0]), 0.0, 0.0
    for _, begin, end in (span for span in spans if span[0]):
        sent, at = sent + end - begin, begin
        for first, last in computed:
            beside += max(0.0, min(last, end) - max(first, at))
            at = max(at, min(last, end))
    return beside / sent if sent else None
