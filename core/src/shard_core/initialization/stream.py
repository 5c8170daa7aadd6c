"""Where a random number generator stood at each moment of a recording, though no number was drawn."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shard_core.initialization.tape import Operation


@dataclasses.dataclass(eq=False, slots=True)
class Position:
    """One state a generator would have been in.

    Attributes:
        state: The state itself, once it is known.
        producer: The operation whose numbers must be drawn to get there; ``None`` where the state was set.
    """

    state: torch.Tensor | None = None
    producer: Operation | None = None


class Stream:
    """The positions of one generator.

    A recorded operation draws nothing, but it moves the generator to a state that no other position has. So whatever
    is done to the generator meanwhile is understood: a state that is known stands for its position, also after it was
    taken with ``get_state`` and set again, and a state that is not known was set from outside, by a seed for instance.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self._positions: dict[bytes, Position] = {}

    def here(self) -> Position:
        """Return the position the generator stands at, a new one if its state was never seen."""
        state = self.generator.get_state()
        return self._positions.setdefault(_key(state), Position(state=state))

    def find(self) -> Position | None:
        """Return the position the generator stands at, or ``None`` if somebody moved it."""
        return self._positions.get(_key(self.generator.get_state()))

    def advance(self, producer: Operation) -> Position:
        """Move the generator to the position after ``producer``."""
        position = Position(producer=producer)
        while True:
            steps = len(self._positions) + 1
            torch.empty(steps, dtype=torch.uint8, device="cpu").random_(generator=self.generator)
            if self._positions.setdefault(_key(self.generator.get_state()), position) is position:
                return position

    def leave(self) -> Position:
        """Leave the generator in a state of its own; numbers to come have nothing to do with those before.

        Where nothing was drawn since the state was last set, the generator is right as it is and stays.
        """
        position = self.here()
        if position.state is None:
            self.generator.manual_seed(int.from_bytes(_key(self.generator.get_state())[:7]))
            self._positions[_key(self.generator.get_state())] = position
        return position

    def arrive(self, position: Position) -> None:
        """Set the generator to the real state of a position."""
        assert position.state is not None
        self.generator.set_state(position.state)
        self._positions[_key(position.state)] = position


def _key(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()
