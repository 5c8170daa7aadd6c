"""Acceptance on a machine with a GPU: what was promised, tried where users train, within a budget of seconds.

Run it with ``python integration_tests/gpu/accept.py --into gpu.json``. Sections stand in order of worth and have a
share of the time each; so do their cases. What is not reached is written as such and comes first in the next run into
the same file. It exits with 1, and a sentence for each, where something is wrong. ``--device cpu --quick`` runs all of
it tiny on a CPU; ``device_page.py`` makes a page of the file.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cases import CUT_OFF, FAILED, NOT_REACHED, PASSED, SKIPPED, Case, Ledger, Machine, run_cases

SECTIONS = {
    "step": 480.0,
    "contract": 360.0,
    "memory": 90.0,
    "faults": 120.0,
    "checkpoint": 210.0,
    "several": 60.0,
}
"""Seconds of each section when there is time for all; with ``--seconds`` they keep their proportions."""
GRACE_SECONDS = 5.0
FORK = multiprocessing.get_context("fork")  # torch is imported once, and CUDA is not touched before


def cases_of(section: str, machine: Machine) -> list[Case]:
    """List the cases of a section, in order of worth."""
    cases: list[Case] = importlib.import_module(f"section_{section}").cases(machine)
    return cases


def work(section: str, names: Sequence[str], machine: Machine, ledger: Ledger, deadline: float) -> None:
    """Run cases in this process, whose group ends with it."""
    if multiprocessing.parent_process() is not None:
        os.setsid()
    known = {case.name: case for case in cases_of(section, machine)}
    for name in run_cases(section, [known[name] for name in names], machine, ledger, deadline):
        record = ledger.records()[f"{section}/{name}"]
        print(f"{section}/{name}: {record['status']} in {record['seconds']} s {record['reason']}", flush=True)


def run_section(section: str, names: Sequence[str], machine: Machine, ledger: Ledger, deadline: float) -> None:
    """Run cases in a process of their own, again after one that ended it, until the time is up."""
    left = list(names)
    while left and time.monotonic() < deadline:
        process = FORK.Process(target=work, args=(section, left, machine, ledger, deadline))
        process.start()
        process.join(deadline + GRACE_SECONDS - time.monotonic())
        in_time = process.exitcode is not None
        _end_group(process)
        records = ledger.records()
        running = [name for name in left if records.get(f"{section}/{name}", {}).get("reason") == CUT_OFF]
        if not in_time or process.exitcode == 0 or not running:
            if process.exitcode and in_time:
                raise SystemExit(f"section {section} ended with {process.exitcode} outside of any case.")
            return
        key = f"{section}/{running[0]}"
        why = f"the process ended with {process.exitcode} in it"
        ledger.write(key, **{**records[key], "status": FAILED, "reason": why})
        left = left[left.index(running[0]) + 1 :]


def _end_group(process: Any) -> None:
    """End what a section has started and left, and nothing else: it leads a group of its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.join()


def run_all(sections: Sequence[str], machine: Machine, ledger: Ledger, seconds: float, missing: bool) -> None:
    """Run what is new or was not reached, then what failed, section by section; then what time is left for."""
    end = time.monotonic() + seconds
    scale = min(1.0, seconds / sum(SECTIONS[name] for name in sections))
    names = {section: [case.name for case in cases_of(section, machine)] for section in sections}
    passes = [(NOT_REACHED, FAILED, SKIPPED), (NOT_REACHED,), *([] if missing else [(PASSED,)])]
    settled = {each: ledger.ordered(each, names[each], machine, [PASSED]) for each in sections}
    spare = 0.0
    for number, among in enumerate(passes):
        for section in sections:
            chosen = ledger.ordered(section, names[section], machine, among)
            if among == (PASSED,):
                chosen = [name for name in chosen if name in settled[section]]
            began = time.monotonic()
            # What a section leaves over goes to the next ones; after the first pass all that is left is for anyone.
            budget = SECTIONS[section] * scale + spare if number == 0 else end - began
            run_section(section, chosen, machine, ledger, min(began + budget, end))
            spare = max(0.0, budget - (time.monotonic() - began)) if number == 0 else 0.0


def main() -> int:
    """Run the program.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="tiny models and few rounds; judge nothing by its time")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=sum(SECTIONS.values()), help="for all sections together")
    parser.add_argument("--into", type=Path, default=Path("gpu.json"), help="the JSON file, made or continued")
    parser.add_argument("--missing", action="store_true", help="do not run again what has passed")
    args = parser.parse_args()
    machine, ledger = Machine(args.device, args.quick), Ledger(args.into)
    run_all(args.section, machine, ledger, args.seconds, args.missing)
    records = {key: each for key, each in ledger.records().items() if key.partition("/")[0] in args.section}
    counts = {word: sum(each["status"] == word for each in records.values()) for word in (PASSED, FAILED, SKIPPED)}
    print(f"{counts}, {len(records) - sum(counts.values())} not reached; {args.into}")
    wrong = [f"{key} failed: {each['reason']}" for key, each in records.items() if each["status"] == FAILED]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
