"""What was measured, written down as it comes: the rank that dies takes nothing with it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What one trial came to.

    Attributes:
        seconds: How long each timed step took, on the rank on which it took longest.
        losses: The loss of every step, the mean over data ranks, those of the warm-up too.
        peak_bytes: The most a rank held during a step; None if it was not measured.
    """

    seconds: list[float]
    losses: list[float]
    peak_bytes: int | None


class Ledger:
    """A file that one rank writes and the process that started it reads, while it is written and afterwards.

    Args:
        path: The file; there is none before the first line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, trial: int) -> None:
        """Record that a trial begins."""
        self._write({"begin": trial})

    def end(self, trial: int, measured: Measured) -> None:
        """Record what a trial came to."""
        self._write({"end": trial, **dataclasses.asdict(measured)})

    def under_way(self) -> int | None:
        """Return which trial has begun and not ended."""
        begun: int | None = None
        for line in self._lines():
            begun = line.get("begin")
        return begun

    def measured(self) -> dict[int, Measured]:
        """List what trials came to, by their numbers."""
        return {line.pop("end"): Measured(**line) for line in self._lines() if "end" in line}

    def _write(self, line: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        for line in self._path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # else it is being written
                yield json.loads(line)
