"""Phases that succeed on every rank or fail on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from shard_core import errors
from shard_core.errors import CheckpointError, CollectiveError, ShardError

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator

T = TypeVar("T")

_SHOWN = 4


def on_all_ranks(coordinator: Coordinator, doing: str, phase: Callable[[], T]) -> list[T]:
    """Run one phase on every rank and return every rank's result.

    Args:
        coordinator: How ranks talk.
        doing: What the phase does, for the message.
        phase: The phase, on this rank; it returns what the coordinator can send.

    Returns:
        What the phase returned on each rank, in rank order.

    Raises:
        CheckpointError: On every rank, if the phase failed on any; names the ranks and the causes. It is
            of the class raised by the first rank that failed, or of the one of Shard's own that this extends. A rank
            that was interrupted, or is to exit, raises that.
    """
    result: T | None = None
    failure: _Failure | None = None
    cause: BaseException | None = None
    try:
        result = phase()
    except CollectiveError:
        raise  # the ranks cannot communicate, so no other can learn of it
    except ShardError as error:
        cause, failure = error, _Failure(_kind(error), str(error), deliberate=True)
    except BaseException as error:  # noqa: BLE001 - every rank raises it below, this one included
        cause, failure = (
            error,
            _Failure(CheckpointError.__name__, f"{type(error).__name__}: {error}", deliberate=False),
        )
    sent = None if failure is None else (failure.kind, failure.text, failure.deliberate)
    answers = coordinator.gather_objects((result, sent))
    failures = {rank: _Failure(*failure) for rank, (_, failure) in enumerate(answers) if failure is not None}
    if cause is not None and not isinstance(cause, Exception):
        raise cause  # an interrupt or an exit is for whoever asked for it; the other ranks know now
    if failures:
        first = next(iter(failures.values()))
        raise _KINDS[first.kind](_joint_sentence(doing, failures, len(answers))) from cause
    return [value for value, _ in answers]  # type: ignore[misc]  # none is missing where no phase failed


def check_same_path(paths: Sequence[str]) -> None:
    """Check that all ranks mean one checkpoint.

    Args:
        paths: What each rank was given, in rank order.

    Raises:
        CheckpointError: If a rank was given another path than rank 0.
    """
    for rank, path in enumerate(paths):
        if path != paths[0]:
            raise CheckpointError(
                f"rank {rank} was given the path {path!r}, rank 0 {paths[0]!r}; all ranks save and load one checkpoint."
            )


#: The classes of errors that ranks send one another, by name.
_KINDS = {
    each.__name__: each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ShardError)
}


def _kind(error: ShardError) -> str:
    """Return the name of an error's class, or of the one of Shard's own that it extends: ranks can send no other."""
    return next(each.__name__ for each in type(error).__mro__ if each in _KINDS.values())


class _Failure(NamedTuple):
    kind: str
    text: str
    deliberate: bool


def _joint_sentence(doing: str, failures: Mapping[int, _Failure], world_size: int) -> str:
    first = next(iter(failures.values()))
    if len(failures) == world_size and len({failure.text for failure in failures.values()}) == 1:
        return first.text if first.deliberate else f"{doing} failed: {first.text}"
    shown = "; ".join(f"rank {rank}: {failure.text}" for rank, failure in list(failures.items())[:_SHOWN])
    more = f"; and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
    return f"{doing} failed on {len(failures)} of {world_size} ranks: {shown}{more}"
