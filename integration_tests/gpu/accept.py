"""Acceptance on a machine with a GPU: what was promised, tried where users train, within a budget of seconds.

Run it with ``python integration_tests/gpu/accept.py --into gpu.json``. Sections stand in order of worth and have a
share of the time each; so do their cases. What is not reached is written as such and comes first in the next run into
the same file. It exits with 1, and a sentence for each, where something is wrong. ``--device cpu --quick`` runs all of
it tiny on a CPU; ``docs/extensions/gpu_page.py`` makes a page of the file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from cases import FAILED, NOT_REACHED, PASSED, SKIPPED, Ledger, Machine, run_cases

SECTIONS = {"step": 450, "contract": 450, "memory": 90, "faults": 120, "checkpoint": 180, "several": 10}
"""Seconds of each section when there is time for all; with ``--seconds`` they keep their proportions."""
GRACE_SECONDS = 5.0
FORK = multiprocessing.get_context("fork")  # torch is imported once, and CUDA is not touched before


def work(section: str, names: Sequence[str], machine: Machine, ledger: Ledger, deadline: float) -> None:
    """Run cases in this process; one of its own leads a group, which whoever started it ends."""
    own = multiprocessing.parent_process() is not None
    if own:
        os.setsid()
    if machine.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device here; --device cpu --quick tries everything tiny without one.")
    module: Any = importlib.import_module(f"section_{section}")
    known = {case.name: case for case in module.cases()}
    if hasattr(module, "begin"):
        module.begin(names, machine)
    for name in run_cases(section, [known[name] for name in names], machine, ledger, deadline):
        record = ledger.records()[f"{section}/{name}"]
        print(f"{section}/{name}: {record['status']} in {record['seconds']} s {record['reason']}", flush=True)
    if own:
        os._exit(0)  # threads that still wait for what is not reached are not waited for


def run_section(section: str, names: Sequence[str], machine: Machine, ledger: Ledger, deadline: float) -> list[str]:
    """Run cases in a process of their own, the rest of them in another after one that ended it, until time is up.

    Returns:
        What went wrong outside of any case.
    """
    left = list(names)
    while left and time.monotonic() < deadline:
        process = FORK.Process(target=work, args=(section, left, machine, ledger, deadline))
        process.start()
        process.join(deadline + GRACE_SECONDS - time.monotonic())
        code = process.exitcode
        assert process.pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        cut = [name for name in left if ledger.clear(f"{section}/{name}")]
        if not code:  # all done, or out of time
            break
        if not cut:
            return [f"section {section} ended with {code} outside of any case"]
        key, why = f"{section}/{cut[0]}", f"the process ended with {code} in it"
        ledger.write(key, **{**ledger.records()[key], "status": FAILED, "reason": why})
        left = left[left.index(cut[0]) + 1 :]
    return []


def run_all(sections: Sequence[str], machine: Machine, ledger: Ledger, seconds: float, missing: bool) -> list[str]:
    """Run what is new or was not reached, then what failed, section by section; then what time is left for."""
    wrong: list[str] = []
    end, spare = time.monotonic() + seconds, 0.0
    scale = min(1.0, seconds / sum(SECTIONS[name] for name in sections))
    names = {each: [case.name for case in importlib.import_module(f"section_{each}").cases()] for each in sections}
    passed = {each: ledger.ordered(each, names[each], machine, [PASSED]) for each in sections}
    for section in sections:
        ledger.announce(section, names[section], machine)
    for section in sections:
        began = time.monotonic()
        budget = SECTIONS[section] * scale + spare
        chosen = ledger.ordered(section, names[section], machine, (NOT_REACHED, FAILED, SKIPPED))
        wrong += run_section(section, chosen, machine, ledger, min(began + budget, end))
        spare = max(0.0, budget - (time.monotonic() - began))
    for section in sections:
        chosen = ledger.ordered(section, names[section], machine, [NOT_REACHED])
        wrong += run_section(section, chosen, machine, ledger, end)
    for section in sections if not missing else ():
        wrong += run_section(section, passed[section], machine, ledger, end)
    return wrong


def main() -> int:
    """Run the program and return its exit code."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for a device would forbid to fork
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds; no figure is judged")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=float(sum(SECTIONS.values())), help="for all sections")
    parser.add_argument("--into", type=Path, default=Path("gpu.json"), help="the JSON file, made or continued")
    parser.add_argument("--missing", action="store_true", help="do not run again what has passed")
    args = parser.parse_args()
    ledger, kind = Ledger(args.into), (args.device, args.quick)
    if any((each["on"], each["quick"]) != kind for each in ledger.records().values()):
        parser.error(f"{args.into} is of runs on another type of device, or of quick ones; give another file.")
    wrong = run_all(args.section, Machine(args.device, args.quick), ledger, args.seconds, args.missing)
    records = {key: each for key, each in ledger.records().items() if key.partition("/")[0] in args.section}
    words = [each["status"] for each in records.values()]
    print(", ".join(f"{words.count(word)} {word}" for word in (PASSED, FAILED, SKIPPED, NOT_REACHED)), f"({args.into})")
    wrong += [f"{key} failed: {each['reason']}" for key, each in records.items() if each["status"] == FAILED]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
