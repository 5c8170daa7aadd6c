"""The cases of the acceptance program: how each ends, where that is written, and which come first in the next run."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PASSED, FAILED, SKIPPED, NOT_REACHED = "passed", "failed", "skipped", "not reached"


class Failed(Exception):
    """Something is wrong: one sentence, and what was measured all the same."""

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})


class Skipped(Exception):
    """Something lacks here: one sentence."""


class Later(Exception):
    """The case waits for something that runs beside it; others can go first."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where cases run, and how thoroughly.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        quick: Whether models are tiny and rounds are few; nothing is judged by time or bytes then.
    """

    device: str
    quick: bool

    @property
    def judges(self) -> bool:
        """Return whether figures of this run can break a bound."""
        return self.device == "cuda" and not self.quick

    def synchronize(self) -> None:
        """Wait for the device; a CPU computes at once."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def need_cuda(self, what: str) -> None:
        """Skip a case that means nothing on a CPU."""
        if self.device != "cuda":
            raise Skipped(f"{what} needs a CUDA device")


@dataclasses.dataclass(frozen=True)
class Case:
    """One question: what answers it with figures or an error, and about how many seconds that takes on a GPU."""

    name: str
    run: Callable[[Machine], Mapping[str, Any]]
    seconds: float


class Ledger:
    """The JSON file: a record for each ``section/case``, written after every one, so that a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}

    def write(self, key: str, **record: Any) -> None:
        """Replace the record of a case: all of the file or nothing of it."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({**self.records(), key: record}, indent=1) + "\n")
        os.replace(draft, self.path)

    def clear(self, key: str) -> bool:
        """Return whether a case was running, and write that it is no more."""
        record = self.records().get(key, {})
        was_running = record.pop("running", False)
        if was_running:
            self.write(key, **record)
        return bool(was_running)

    def status(self, key: str, machine: Machine) -> str:
        """Return how a case ended on a machine of this kind; a quick run says nothing about a full one."""
        record = self.records().get(key, {})
        alike = (record.get("on"), record.get("quick")) == (machine.device, machine.quick)
        return str(record["status"]) if alike else NOT_REACHED

    def announce(self, section: str, names: Sequence[str], machine: Machine) -> None:
        """Write that cases without an outcome are not reached, which holds until they are."""
        for name in self.ordered(section, names, machine, [NOT_REACHED]):
            kind = {"on": machine.device, "quick": machine.quick}
            self.write(f"{section}/{name}", status=NOT_REACHED, reason="the time was up", **kind)

    def ordered(self, section: str, names: Sequence[str], machine: Machine, among: Sequence[str]) -> list[str]:
        """Choose the cases of some statuses: in the order of the statuses, within each in order of worth."""
        statuses = {name: self.status(f"{section}/{name}", machine) for name in names}
        return [name for status in among for name in names if statuses[name] == status]


def run_cases(section: str, cases: Sequence[Case], machine: Machine, ledger: Ledger, deadline: float) -> Iterator[str]:
    """Run cases until ``time.monotonic()`` reaches the deadline, write how each ended, and yield its name."""
    kind = {"on": machine.device, "quick": machine.quick}
    ledger.announce(section, [case.name for case in cases], machine)
    queue = list(cases)
    while queue:
        case = queue.pop(0)
        key, began = f"{section}/{case.name}", time.monotonic()
        if deadline - began < (case.seconds if machine.judges else 0.0):
            continue
        ledger.write(key, **{**ledger.records()[key], "running": True})
        try:
            status, reason, figures = _outcome(case, machine)
        except Later:
            ledger.clear(key)
            queue.append(case)
            time.sleep(0.1)
            continue
        found_on = {
            "device": torch.cuda.get_device_name() if machine.device == "cuda" else "CPU",
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - began, 1),
        }
        ledger.write(key, status=status, reason=reason, figures=figures, **kind, **found_on)
        yield case.name


def _outcome(case: Case, machine: Machine) -> tuple[str, str, dict[str, Any]]:
    try:
        return PASSED, "", dict(case.run(machine))
    except Later:
        raise
    except Skipped as lack:
        return SKIPPED, str(lack), {}
    except Failed as failure:
        return FAILED, str(failure), failure.figures
    except Exception as error:  # noqa: BLE001 - whatever goes wrong in a case is its outcome
        return FAILED, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:600], {}
