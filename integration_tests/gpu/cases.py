"""The cases of the acceptance program: how each ends, and the JSON file in which that is written."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shard_core import get_strategy

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the loops that both have
PASSED, FAILED, SKIPPED, NOT_REACHED = "passed", "failed", "skipped", "not reached"


@contextlib.contextmanager
def started(name: str, machine: Machine, **options: Any) -> Iterator[Any]:
    """Start a strategy in a world of one, over NCCL on a GPU; free what was held in it at the end."""
    options |= {"tensor_parallel_size": 1} if name == "tp" else {}
    with get_strategy(name, accelerator=machine.device, devices=1, **options) as strategy:
        yield strategy
    free(machine)


def free(machine: Machine) -> None:
    """Give back what nothing holds any more."""
    gc.collect()
    if machine.device == "cuda":
        torch.cuda.empty_cache()


class Failed(Exception):
    """Something is wrong: one sentence, and what was measured all the same."""

    def __init__(self, reason: str, figures: Mapping[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.figures = dict(figures or {})


class Skipped(Exception):
    """Something lacks here: one sentence."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """Where cases run, ``"cuda"`` or ``"cpu"``, and whether tiny and in few rounds; figures of such judge nothing."""

    device: str
    quick: bool

    @property
    def judges(self) -> bool:
        return self.device == "cuda" and not self.quick

    @property
    def kind(self) -> dict[str, Any]:
        return {"on": self.device, "quick": self.quick}

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def need_cuda(self, what: str, devices: int = 1) -> None:
        """Skip a case that means nothing on a CPU, or with fewer devices."""
        here = torch.cuda.device_count() if self.device == "cuda" else 0
        if here < devices:
            raise Skipped(f"{what} needs {devices} CUDA device{'s' * (devices > 1)}, {here} here")


@dataclasses.dataclass(frozen=True)
class Case:
    """One question: what answers it, about how many seconds that takes on a GPU, and whether others may run beside."""

    name: str
    run: Callable[[Machine], Mapping[str, Any]]
    seconds: float
    beside: bool = False

    def outcome(self, machine: Machine) -> dict[str, Any]:
        """Run it and return its record."""
        began, figures, status, reason = time.monotonic(), {}, PASSED, ""
        try:
            figures = dict(self.run(machine))
        except Skipped as lack:
            status, reason = SKIPPED, str(lack)
        except Failed as failure:
            status, reason, figures = FAILED, str(failure), failure.figures
        except Exception as error:  # noqa: BLE001 - whatever goes wrong in a case is its outcome
            status, reason = FAILED, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:600]
        device = torch.cuda.get_device_name() if machine.device == "cuda" else "CPU"
        record = {"status": status, "reason": reason, "figures": figures, **machine.kind, "device": device}
        record |= {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
        return record | {"seconds": round(time.monotonic() - began, 1)}


class Ledger:
    """The JSON file: a record for each ``section/case``, written after every one, so that a kill loses nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def records(self) -> dict[str, dict[str, Any]]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}

    def write(self, key: str, record: Mapping[str, Any]) -> None:
        """Replace the record of a case: all of the file or nothing of it."""
        draft = self.path.with_suffix(".draft")
        draft.write_text(json.dumps({**self.records(), key: record}, indent=1) + "\n")
        os.replace(draft, self.path)

    def ordered(self, section: str, names: Sequence[str], machine: Machine, among: Sequence[str]) -> list[str]:
        """Choose the cases of some statuses, in their order; of runs of another kind nothing counts."""
        known = self.records()
        found = {name: known.get(f"{section}/{name}", {}) for name in names}
        alike = {name: machine.kind.items() <= record.items() for name, record in found.items()}
        statuses = {name: found[name]["status"] if alike[name] else NOT_REACHED for name in names}
        return [name for status in among for name in names if statuses[name] == status]
