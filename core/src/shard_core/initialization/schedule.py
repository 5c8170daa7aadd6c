"""Which recorded operations a value needs, and in which order they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shard_core.initialization.stream import Position, Stream
    from shard_core.initialization.tape import Operation, Value


def closure(values: Iterable[Value], ends: Iterable[Position]) -> list[Operation]:
    """List the operations that must run for values and positions to be known, in program order."""
    return _led_to([value.producer for value in values] + [_missing(end) for end in ends], _missing)


def program(values: Iterable[Value]) -> list[Operation]:
    """List the operations that made values what they are, in program order, whatever of them has run before."""
    return _led_to([value.producer for value in values], lambda position: position.producer)


def ordered(operations: list[Operation]) -> Iterator[Operation]:
    """Yield the operations in program order, each that draws nothing as early as it can run."""
    needed = set(operations)
    waits: Counter[Operation] = Counter()
    followers: dict[Operation, list[Operation]] = {operation: [] for operation in operations}
    for operation in operations:
        earlier = {value.producer for value in operation.reads}
        # A change in place must wait for those that still read what was there before.
        earlier |= {reader for old, _ in operation.renews for reader in old.readers}
        for other in earlier & needed - {operation}:
            assert other is not None
            followers[other].append(operation)
            waits[operation] += 1
    done: set[Operation] = set()
    for operation in operations:
        ready = [] if operation in done else [operation]
        while ready:
            runnable = ready.pop()
            done.add(runnable)
            yield runnable
            for follower in reversed(followers[runnable]):
                waits[follower] -= 1
                if not waits[follower] and follower.stream is None:
                    ready.append(follower)


def revisited(operations: list[Operation]) -> set[Position]:
    """Find the positions a generator goes back to, whose states must be kept."""
    at: dict[Stream, Position | None] = {}
    found: set[Position] = set()
    for operation in operations:
        if operation.stream is None or operation.before is None:
            continue
        if operation.before is not at.get(operation.stream):
            found.add(operation.before)
        at[operation.stream] = operation.after
    return found


def _led_to(last: list[Operation | None], leading_to: Callable[[Position], Operation | None]) -> list[Operation]:
    found: dict[int, Operation] = {}
    waiting = [*last]
    while waiting:
        operation = waiting.pop()
        if operation is None or operation.index in found:
            continue
        found[operation.index] = operation
        waiting += [value.producer for value in operation.reads]
        if operation.before is not None:
            waiting.append(leading_to(operation.before))
    return [found[index] for index in sorted(found)]


def _missing(position: Position) -> Operation | None:
    return position.producer if position.state is None else None
