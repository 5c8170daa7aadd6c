"""Where strategies were seen to run: a record beside this file, which the acceptance program for GPUs writes."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

RECORD = "seen.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """A line of the record.

    Attributes:
        name: The strategy's.
        package: The distribution that it was seen in.
        on: As ``seen_on`` returns it.
    """

    name: str
    package: str
    on: Mapping[str, Mapping[str, str] | None]


def seen_on(name: str, distribution: str) -> Mapping[str, Mapping[str, str] | None] | None:
    """Return where a strategy was last seen to keep every promise it was held to.

    Args:
        name: The strategy's.
        distribution: Who offers it; another one's of the same name was not seen.

    Returns:
        For ``"cpu"``, ``"cuda"`` and ``"tpu"``, as far as its engine runs there, the ``"device"``, its product name,
        ``"torch"`` and ``"date"`` of that run, or None if it was never seen there; None for a strategy of which no
        record is kept.

    Example:
        >>> sorted(seen_on("ddp", "shard-core"))
        ['cpu', 'cuda']
        >>> seen_on("ddp", "a stranger's")
    """
    return next((each.on for each in seen_strategies() if (each.name, each.package) == (name, distribution)), None)


def where_seen(seen: Mapping[str, Mapping[str, str] | None] | None, *, when: bool = True) -> str:
    """Write in words where a strategy was seen to run.

    Args:
        seen: What ``seen_on`` has returned.
        when: Whether to write with which torch and on which day, too.

    Example:
        >>> where_seen({"cpu": {"device": "CPU", "torch": "2.13.0", "date": "2026-11-26"}, "tpu": None})
        'CPU (torch 2.13.0, 2026-11-26); TPU: never'
        >>> where_seen({"cpu": {"device": "CPU", "torch": "2.13.0", "date": "2026-11-26"}, "tpu": None}, when=False)
        'CPU; TPU: never'
        >>> where_seen(None)
        'no record'
    """
    if seen is None:
        return "no record"
    words = []
    for hardware, each in seen.items():
        if each is None:
            words.append(f"{hardware.upper()}: never")
        else:
            words.append(f"{each['device']} (torch {each['torch']}, {each['date']})" if when else each["device"])
    return "; ".join(words)


@functools.cache
def seen_strategies() -> tuple[Seen, ...]:
    """List the strategies of which a record is kept."""
    text = importlib.resources.files(__package__).joinpath(RECORD).read_text(encoding="utf-8")
    return tuple(Seen(name=name, **each) for name, each in json.loads(text).items())
