"""What all suites share: the strategy under test and the ranks it is judged on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from shard_core import plugins
from shard_core.testing.processes.fork_server import fork_server
from shard_core.testing.rules import RuleBroken, promise_of
from shard_core.testing.strategy_under_test import Ranks, Subject

if TYPE_CHECKING:
    from shard_core.plugins.info import StrategyInfo
    from shard_core.testing.processes.worlds import Worlds
    from shard_core.testing.selected_promises import Chosen


class Suite:
    """Promises about one noun, held against one strategy.

    Authors inherit from ``Conformance``, which has all suites, and set what differs.
    """

    #: The strategy's name; must be set.
    strategy: ClassVar[str]

    #: Arguments of ``get_strategy`` beside the name; may be set.
    options: ClassVar[Mapping[str, Any]] = {}

    #: Numbers of ranks the strategy is judged at; may be set. More than it runs on are left out.
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3)

    #: The device type it is judged on; may be set.
    device: ClassVar[str] = "cpu"

    #: Environment variables its ranks are started with; may be set.
    environment: ClassVar[Mapping[str, str]] = {}

    #: How many times longer than others its ranks may take, if its engine compiles, say; may be set.
    patience: ClassVar[float] = 1.0

    #: Promises that are not kept yet, each with the reason; may be set. One that is kept after all fails.
    known_failures: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a promise at its world sizes."""
        if "ranks" in metafunc.fixturenames:
            held = promise_of(metafunc.function)
            sizes = self.sizes() if held is None or held.every_size else (self.main_size(),)
            metafunc.parametrize("ranks", sizes, indirect=True, ids=[f"{size}ranks" for size in sizes])

    @property
    def info(self) -> StrategyInfo:
        """Return the strategy's metadata."""
        return plugins.find(self.strategy)

    @property
    def subject(self) -> Subject:
        """Return how to get the strategy under test."""
        return Subject(name=self.strategy, options={"accelerator": self.device, **self.options})

    def _other(self, strategy: str) -> Subject:
        """Return another strategy for the same kind of device, or where it runs if not there."""
        there = self.device in plugins.find(strategy).devices
        return Subject(name=strategy, options={"accelerator": self.device if there else "cpu"})

    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks this strategy is judged at."""
        most = self.info.max_ranks
        sizes = tuple(size for size in self.world_sizes if most is None or size <= most)
        if not sizes:
            raise RuleBroken(
                f"{self.strategy!r} runs on {most} ranks at most, and world_sizes={tuple(self.world_sizes)} has "
                f"nothing so small; add {most}."
            )
        return sizes

    def main_size(self) -> int:
        """Return the number of ranks for what need not be judged at all: two, or what is nearest."""
        return min(self.sizes(), key=lambda size: (abs(size - 2), size))

    @pytest.fixture(autouse=True)
    def start_fork_servers(self, chosen: Chosen) -> None:
        """Start the servers that fork a class's ranks, which import beside its first promises, which need none."""
        for rank in range(chosen.most_ranks):
            fork_server(rank, self.environment)

    @pytest.fixture
    def ranks(self, request: pytest.FixtureRequest, worlds: Worlds) -> Ranks:
        """Return the ranks of this case, with the strategy under test."""
        return Ranks(worlds(request.param, self.environment), self.subject, self.patience)

    @pytest.fixture
    def ranks_of(self, worlds: Worlds) -> Callable[..., Ranks]:
        """Return a callable for other places: ``ranks_of(3)``, or ``ranks_of(2, "ddp")`` for another strategy."""

        def place(size: int, strategy: str | None = None) -> Ranks:
            if strategy is not None:
                return Ranks(worlds(size), self._other(strategy), self.patience)
            return Ranks(worlds(size, self.environment), self.subject, self.patience)

        return place
