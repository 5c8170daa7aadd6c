"""The strategy a suite holds to its promises, and the ranks it is judged on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.errors import MissingCapability
from shard_core.selection import get_strategy
from shard_core.testing.rules import CapabilityRefused

if TYPE_CHECKING:
    from shard_core.strategy import Strategy
    from shard_core.testing.processes.world import World


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """How to get the strategy under test; travels to the ranks.

    Attributes:
        name: The strategy's name.
        options: Arguments of ``get_strategy``, each time.
    """

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def strategy(self, **more: Any) -> Strategy:
        """Build the strategy.

        Args:
            more: Arguments of ``get_strategy`` that this test is about.
        """
        return get_strategy(self.name, **{**self.options, **more})


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refusal:
    message: str


class Ranks:
    """A world of ranks, with the strategy that is judged on it.

    Args:
        world: The ranks.
        subject: The strategy.
        patience: What time limits are multiplied by.
    """

    def __init__(self, world: World, subject: Subject, patience: float = 1.0) -> None:
        self._world = world
        self._patience = patience
        self.subject = subject

    @property
    def size(self) -> int:
        """Return how many there are."""
        return self._world.size

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """Call ``function(subject, *args)`` on every rank.

        Args:
            function: A function at the top of a module.
            args: Arguments that can be pickled.
            timeout: Seconds until a rank that has not returned counts as hung, for a strategy that needs no patience.

        Returns:
            What the ranks returned, in rank order.

        Raises:
            RankFailed: If a rank raised, died or hung.
            CapabilityRefused: If every rank raised ``MissingCapability``.
        """
        answers = self._world.run(_attempt, function, self.subject, args, timeout=timeout * self._patience)
        refusals = [answer for answer in answers if isinstance(answer, _Refusal)]
        if not refusals:
            return answers
        if len(refusals) < len(answers):
            ranks = [rank for rank, answer in enumerate(answers) if isinstance(answer, _Refusal)]
            raise AssertionError(f"only ranks {ranks} of {len(answers)} refused: {refusals[0].message}")
        raise CapabilityRefused(refusals[0].message)


def _attempt(function: Callable[..., Any], subject: Subject, args: tuple[Any, ...]) -> Any:
    try:
        return function(subject, *args)
    except MissingCapability as error:
        return _Refusal(message=str(error))
