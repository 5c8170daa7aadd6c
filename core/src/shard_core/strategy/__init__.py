"""The strategy: the one object a user holds; a file per part of its life, from ``lifecycle`` to ``checkpointing``."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from shard_core.errors import ShardError
from shard_core.mesh import DataRanks
from shard_core.preparation.torn_down import refuse_shards
from shard_core.strategy.checkpointing import StrategyCheckpointing


class Strategy(StrategyCheckpointing):
    """Trains modules on one kind of engine; the same calls give the same result on every other.

    Build it with ``get_strategy``; all arguments are keywords. Nothing is started before ``launch``,
    ``setup_environment`` or a ``with`` statement. A backend's class stands one level below and
    implements the members of ``Engine``; it overrides none of those users call.

    Args:
        info: What is known of the strategy under the name it was asked for; None for its default name.
        arguments: Those every strategy takes (the fields of ``RunOptions``) and the strategy's own
            (the fields of its ``config_type``).

    Raises:
        InvalidOption: If an argument has a name, a type or a value that is not allowed.
        UnsupportedPrecision: If there is no such precision.
    """

    def teardown(self) -> None:
        """Leave the other ranks and drop modules and optimizers; does nothing the second time.

        A save that is under way is completed first. A module of which each rank holds all, as under ``"single"`` and
        ``"ddp"``, is one of plain PyTorch again: it runs and trains on, each rank's alone. Where parameters are spread
        over several ranks, calling the module and stepping its optimizers are refused from then on.

        Raises:
            CheckpointError: If it fails; everything has been left by then.
        """
        self._teardown(self.collectives.close)

    def _teardown(self, leave_ranks: Callable[[], None]) -> None:
        try:
            self._saves.settle()
        finally:
            self._leave(leave_ranks)

    def _leave(self, leave_ranks: Callable[[], None]) -> None:
        if self._placement is not None:
            self.engine_teardown()
        for known in self._registry:
            optimizers = (*known.optimizers, *known.guests)
            refuse_shards(self.info.name, known.module, known.partial_state.spread(), optimizers)
        self._registry.clear()
        self._mesh = None
        self._data = DataRanks(rank=0, size=1)
        if self._placement is not None:
            self._placement = None
            leave_ranks()

    def __enter__(self) -> Self:
        """Start, as ``setup_environment`` does."""
        self.setup_environment()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tear down; an error from inside is raised, whatever goes wrong now, and waits for no other rank."""
        fails = error is not None and not isinstance(error, SystemExit)
        try:
            self._teardown(self.collectives.abort if fails else self.collectives.close)
        except ShardError as failure:
            if error is None:
                raise
            error.add_note(f"After that, {failure}")
