"""What of the kit will be judged, once everybody has left out what they wish."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shard_core.testing.rules import promise_of

if TYPE_CHECKING:
    import pytest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """What will be judged of one class.

    Attributes:
        names: Its promises that will be.
        most_ranks: The largest number of ranks it will be judged on; 0 if on none.
    """

    names: frozenset[str]
    most_ranks: int


def chosen_by_class(items: Iterable[pytest.Item]) -> dict[type, Chosen]:
    """Sum up the cases of a session, by class."""
    names: dict[type, set[str]] = {}
    ranks: dict[type, int] = {}
    for item in items:
        held, cls = promise_of(getattr(item, "obj", None)), getattr(item, "cls", None)
        if held is not None and cls is not None:
            names.setdefault(cls, set()).add(held.name)
            case = getattr(item, "callspec", None)
            ranks[cls] = max(ranks.get(cls, 0), case.params.get("ranks", 0) if case else 0)
    return {cls: Chosen(names=frozenset(found), most_ranks=ranks[cls]) for cls, found in names.items()}
