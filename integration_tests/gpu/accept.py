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
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from cases import FAILED, NOT_REACHED, PASSED, SKIPPED, Case, Ledger, Machine

SECTIONS = {"step": 450, "contract": 450, "memory": 90, "faults": 120, "checkpoint": 180, "several": 30}
"""Seconds of each section when there is time for all; with ``--seconds`` they keep their proportions."""
GRACE_SECONDS, LEAVE_SECONDS, AT_ONCE = 5.0, 40.0, 10
FORK = multiprocessing.get_context("fork")  # torch is imported once, and CUDA is not touched before


def cases_of(section: str) -> dict[str, Case]:
    found: list[Case] = importlib.import_module(f"section_{section}").cases()
    return {case.name: case for case in found}


class Running:
    """A case in a process of its own, which may end as it likes; whatever it has started ends with it."""

    def __init__(self, section: str, case: Case, machine: Machine) -> None:
        self.key, self.machine = f"{section}/{case.name}", machine
        self._end, end = FORK.Pipe(duplex=False)
        self._process = FORK.Process(target=self._work, args=(case, end))
        self._process.start()
        end.close()

    def _work(self, case: Case, end: Connection) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that it ends what has groups of its own
        end.send(case.outcome(self.machine))
        os._exit(0)  # threads that still wait for something are not waited for

    def finish(self, ledger: Ledger, deadline: float) -> None:
        """Wait until it has ended or its time is up, and write how it has ended."""
        in_time = self._end.poll(max(0.0, deadline + GRACE_SECONDS - time.monotonic()))
        record = None
        with contextlib.suppress(EOFError):
            record = self._end.recv() if in_time else None
        if in_time and record is None:
            self._process.join()
            why = f"the process ended with {self._process.exitcode} in it"
            record = {"status": FAILED, "reason": why, **self.machine.kind}
        self._process.terminate()
        self._process.join(LEAVE_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        if record:
            ledger.write(self.key, record)
            print(f"{self.key}: {record['status']} {record['reason']}", flush=True)


def run_section(section: str, names: Sequence[str], machine: Machine, ledger: Ledger, deadline: float) -> None:
    """Run cases until the time is up: those that allow it beside the others, which take turns."""
    cases, running = cases_of(section), list[Running]()
    waiting = [cases[name] for name in names if cases[name].beside]

    def begin() -> None:
        while waiting and len(running) < (1 if machine.quick else AT_ONCE):
            case = waiting.pop(0)
            running.extend([Running(section, case, machine)] if time.monotonic() < deadline else [])

    for case in (cases[name] for name in names if not cases[name].beside):
        begin()
        if deadline - time.monotonic() > (case.seconds if machine.judges else 0.0):
            Running(section, case, machine).finish(ledger, deadline)
    while waiting or running:
        begin()
        for each in running[:1]:
            running.remove(each)
            each.finish(ledger, deadline)


def run_all(sections: Sequence[str], machine: Machine, ledger: Ledger, seconds: float) -> None:
    """Run what is new or was not reached, then what failed, section by section; then what time is left for."""
    end, spare = time.monotonic() + seconds, 0.0
    scale = min(1.0, seconds / sum(SECTIONS[name] for name in sections))
    names = {each: list(cases_of(each)) for each in sections}
    passed = {each: ledger.ordered(each, names[each], machine, [PASSED]) for each in sections}
    for section in sections:
        for name in ledger.ordered(section, names[section], machine, [NOT_REACHED]):
            record = {"status": NOT_REACHED, "reason": "the time was up", **machine.kind}
            ledger.write(f"{section}/{name}", record)  # which holds until it is reached
    for section in sections:
        began, budget = time.monotonic(), SECTIONS[section] * scale + spare
        chosen = ledger.ordered(section, names[section], machine, (NOT_REACHED, FAILED, SKIPPED))
        run_section(section, chosen, machine, ledger, min(began + budget, end))
        spare = max(0.0, budget - (time.monotonic() - began))
    for section in sections:
        chosen = ledger.ordered(section, names[section], machine, [NOT_REACHED])
        run_section(section, chosen, machine, ledger, end)
    for section in sections:
        run_section(section, passed[section], machine, ledger, end)


def main() -> int:
    """Run the program and return its exit code."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for a device would forbid to fork
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds; no figure is judged")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=float(sum(SECTIONS.values())), help="for all sections")
    parser.add_argument("--into", type=Path, default=Path("gpu.json"), help="the JSON file, made or continued")
    args = parser.parse_args()
    ledger, machine = Ledger(args.into), Machine(args.device, args.quick)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --device cpu --quick tries everything tiny without one.")
    if any(not machine.kind.items() <= each.items() for each in ledger.records().values()):
        parser.error(f"{args.into} is of runs on another type of device, or of quick ones; give another file.")
    run_all(args.section, machine, ledger, args.seconds)
    records = {key: each for key, each in ledger.records().items() if key.partition("/")[0] in args.section}
    words = [each["status"] for each in records.values()]
    print(", ".join(f"{words.count(word)} {word}" for word in (PASSED, FAILED, SKIPPED, NOT_REACHED)), f"({args.into})")
    wrong = [f"{key} failed: {each['reason']}" for key, each in records.items() if each["status"] == FAILED]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
