"""What a started rank reports to its launcher, in one small file per rank."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

STARTED, DONE, FAILED, REFUSED = "started", "done", "failed", "refused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The last report of a rank.

    Attributes:
        rank: Which rank.
        state: ``"started"``, ``"done"``, ``"failed"``, or ``"refused"`` where the launch itself was at fault.
        cause: One line: what went wrong.
        detail: The rank's own traceback.
        sentence: The message of the error, if it was raised on purpose.
        pid: Its process.
        when: Seconds on a clock that all processes of this host share.
    """

    rank: int
    state: str
    cause: str = ""
    detail: str = ""
    sentence: str | None = None
    pid: int = dataclasses.field(default_factory=os.getpid)
    when: float = dataclasses.field(default_factory=time.time)

    def write(self, folder: str) -> None:
        """Replace this rank's last report; a reader sees the old or the new, never a part.

        Args:
            folder: The launch's own folder.
        """
        unfinished = Path(folder, f"rank-{self.rank}.part")
        unfinished.write_text(json.dumps(dataclasses.asdict(self)))
        unfinished.replace(_path(folder, self.rank))


def read_report(folder: str, rank: int) -> Report | None:
    """Read the last report of a rank.

    Args:
        folder: The launch's own folder.
        rank: Whose report.

    Returns:
        The report, or None if the rank has not come as far as writing one.
    """
    try:
        return Report(**json.loads(_path(folder, rank).read_text()))
    except FileNotFoundError:
        return None


def _path(folder: str, rank: int) -> Path:
    return Path(folder, f"rank-{rank}.json")
