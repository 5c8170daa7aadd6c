"""The kit and random programs of every strategy on the device, and collectives of two ranks that share it."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from cases import Case, Failed, Machine, Skipped

from shard_core import plugins
from shard_core.testing.processes.script import PythonRun

KIT_SECONDS, PROGRAMS, QUICK_PROMISE = 330.0, 40, "micro_batches_add_up"


def cases() -> list[Case]:
    """List the cases, in order of worth; they compute little, so that they run beside one another."""
    found = [each for each in plugins.installed() if each.info is None or "cuda" in each.info.devices]
    return [
        Case("gloo, two ranks on one device", collectives, 2, beside=True),
        *(Case(f"kit: {each.name}", functools.partial(kit, each.name), 2, beside=True) for each in found),
        *(Case(f"programs: {each.name}", functools.partial(programs, each.name), 2, beside=True) for each in found),
    ]


def judge(name: str, machine: Machine, *more: str) -> Any:
    """Run the kit on the first device and return its JSON."""
    problem = next(each.problem for each in plugins.installed() if each.name == name)
    if problem:
        raise Skipped(problem)
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    given = {"CUDA_VISIBLE_DEVICES": first, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    command = ["-m", "shard_core.testing", name, "--device", machine.device, "--json", *more]
    with tempfile.TemporaryDirectory() as folder:  # where it would write a program that shows a defect
        done = PythonRun(command, folder=Path(folder), environment=given).outcome(KIT_SECONDS)
    if done.exit_code not in (0, 1):
        raise Failed(f"the kit ended with {done.exit_code}: {' '.join(done.errors.strip().splitlines()[-1:])}")
    return json.loads(done.output)


def kit(name: str, machine: Machine, *promises: str, ranks: int = 1) -> dict[str, Any]:
    """Count the promises that are kept, all precisions among them; fail with those that are broken."""
    chosen = [part for each in promises or [QUICK_PROMISE] * machine.quick for part in ("--promise", each)]
    verdicts = judge(name, machine, "--world-sizes", str(ranks), *chosen)
    words = dict.fromkeys(each["status"] for each in verdicts)
    of = {word: {e["promise"]: e["reason"] for e in verdicts if e["status"] == word} for word in words}
    broken = of.get("broken", {})
    figures: dict[str, Any] = {"counts": {word: len(those) for word, those in of.items()}, "broken": broken}
    figures |= {"not_judged": of.get("not judged", {}), "kept": list(of.get("kept", {})) if promises else []}
    if broken:
        raise Failed(f"{len(broken)} promises are broken: {', '.join(broken)}", figures)
    return figures


def collectives(machine: Machine) -> dict[str, Any]:
    """Try each collective on two ranks, which share the device over gloo."""
    from shard_core.testing import Conformance, promise_of  # which need pytest

    found = (promise_of(getattr(Conformance, name)) for name in dir(Conformance))
    names = [each.name for each in found if each and each.noun == "collectives"]
    return kit("ddp", machine, *(names[:2] if machine.quick else names), ranks=2)


def programs(name: str, machine: Machine) -> dict[str, Any]:
    """Hold random programs on the device to plain PyTorch."""
    count, minutes = str(1 if machine.quick else PROGRAMS), str(KIT_SECONDS / 120)
    report = judge(name, machine, "--world-sizes", "1", "--programs", count, "--minutes", minutes)
    figures = {"counts": report["verdicts"], "defect": report["defect"]}
    if report["defect"]:
        raise Failed(f"a random program shows a defect: {report['defect']['symptom']}", figures)
    return figures
