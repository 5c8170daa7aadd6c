"""Which checkpoints of a run are kept, and which are removed as new ones come."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shard_core.checkpoint.retention.removal import remove_entry
from shard_core.checkpoint.retention.run_folder import RunEntry, Standing, entries_of
from shard_core.errors import CheckpointError, InvalidOption

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import Folder

#: A save that has not written for this many seconds is taken for dead.
SAFE_AGE = 24 * 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """A rule for which of a run's committed checkpoints stay.

    The newest is the one committed last, whatever its step or a clock says. It always stays.

    Attributes:
        keep_last: How many of the newest stay.
        keep_every: Those whose saved ``step`` is a multiple of this stay as well; so does one without a
            step. None for no others.

    Raises:
        InvalidOption: If either is no number from 1 up.

    Example:
        >>> Retention(keep_last=0)
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: keep_last is 0; it must be a number from 1 up.
    """

    keep_last: int
    keep_every: int | None = None

    def __post_init__(self) -> None:
        """Check both numbers."""
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if (type(value) is not int or value < 1) and not (name == "keep_every" and value is None):
                raise InvalidOption(f"{name} is {value!r}; it must be a number from 1 up.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What becomes of one subfolder of a run's folder.

    Attributes:
        entry: The subfolder.
        removes: ``"nothing"``, ``"all"``, of a checkpoint that goes only what is its own (``"checkpoint"``), or of one
            that stays only its ``"leftovers"``.
        reason: Why, in a few words.
        hindered: Whether it would be removed, but for a file in it that no save wrote.
    """

    entry: RunEntry
    removes: str
    reason: str
    hindered: bool = False

    @property
    def bytes(self) -> int:
        """How much room becomes free."""
        leftovers = sum(self.entry.leftovers.values())
        own = self.entry.bytes
        return {"nothing": 0, "leftovers": leftovers, "checkpoint": own, "all": own + leftovers}[self.removes]


def decide(
    entries: Sequence[RunEntry], retention: Retention | None, *, safe_age: float = SAFE_AGE, now: float | None = None
) -> list[Decision]:
    """Decide of each entry of a run's folder whether it stays.

    Args:
        entries: All of them, the oldest first.
        retention: Which checkpoints stay; None for all.
        safe_age: Leftovers of saves stay until nothing was written beside them for so many seconds.
        now: Seconds since 1970; None for now.
    """
    now = time.time() if now is None else now
    newest = [entry for entry in entries if entry.standing is Standing.COMMITTED]
    last = {entry.folder for entry in newest[-retention.keep_last :]} if retention else set()
    return [_decision(entry, retention, entry.folder in last, now - entry.touched >= safe_age) for entry in entries]


def _decision(entry: RunEntry, retention: Retention | None, is_last: bool, is_old: bool) -> Decision:
    removes, reason = "nothing", ""
    if entry.standing is Standing.DAMAGED:
        reason = "its manifest is damaged; look at it, and remove it by hand"
    elif entry.standing is Standing.UNCOMMITTED:
        removes, reason = ("all", "a save that died") if is_old else ("nothing", "a save may be under way")
    elif retention is None or is_last:
        reason = f"among the last {retention.keep_last}" if retention else "a checkpoint"
    elif retention.keep_every is not None and entry.step is None:
        reason = "has no step"
    elif retention.keep_every is not None and entry.step is not None and entry.step % retention.keep_every == 0:
        reason = f"every {retention.keep_every} steps"
    else:
        # What its manifest does not name may be of a save that is replacing it.
        removes, reason = ("all" if is_old or not entry.leftovers else "checkpoint"), "older"
    if removes in ("all", "checkpoint") and entry.unknown:
        reason = f"holds {entry.unknown[0]!r}, which no save made"
        return Decision(entry=entry, removes="nothing", reason=reason, hindered=True)
    if removes == "nothing" and entry.standing is Standing.COMMITTED and entry.leftovers and is_old:
        return Decision(entry=entry, removes="leftovers", reason="left by a save that died")
    return Decision(entry=entry, removes=removes, reason=reason)


def retain(saved: Folder, retention: Retention) -> None:
    """Remove what a rule does not keep beside a checkpoint that was just committed; called on one rank alone.

    Nothing that goes wrong here undoes the save: it becomes a warning. What saves that died have left stays.

    Args:
        saved: The checkpoint, which stays whatever the rule says.
        retention: The rule, over all checkpoints in the folder that this one is in.
    """
    try:
        entries = [entry for entry in entries_of(saved.parent) if entry.standing is Standing.COMMITTED]
        decisions = decide(entries, retention)
    except (CheckpointError, OSError) as error:
        warnings.warn(f"no old checkpoint was removed: {error}", stacklevel=2)
        return
    if retention.keep_every is not None and any(each.step is None for each in entries):
        warnings.warn(
            f"keep_every={retention.keep_every} keeps every checkpoint in {str(saved.parent)!r} that has no step; put "
            "'step', a whole number, into the state that is saved.",
            stacklevel=2,
        )
    for decision in decisions:
        if decision.hindered:
            warnings.warn(f"an old checkpoint stays: {str(decision.entry.folder)!r} {decision.reason}.", stacklevel=2)
        if decision.removes not in ("all", "checkpoint") or decision.entry.folder.name == saved.name:
            continue
        try:
            remove_entry(decision.entry, leftovers=decision.removes == "all")
        except CheckpointError as error:
            warnings.warn(f"an old checkpoint stays: {error}", stacklevel=2)
