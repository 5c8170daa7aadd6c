"""Building a module without the memory of its values, and computing them later, one tensor at a time."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shard_core._versions import loading_values, replaced_trunc_normal, unset_fake_temporarily
from shard_core.errors import CannotReplay
from shard_core.initialization.agreement import check_agreement
from shard_core.initialization.interception import Interception, Values, intercepted
from shard_core.initialization.replay import Replay
from shard_core.initialization.schedule import program

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator
    from shard_core.initialization.tape import Value, View


class Recording:
    """Every operation that made or changed tensors without values, and where the generators stood.

    Operations after the block belong to it as well: what happens to a recorded tensor between the constructor and
    the replay is never lost.
    """

    def __init__(self, coordinator: Coordinator | None = None) -> None:
        self.coordinator = coordinator
        self._interception = Interception(self)
        self._tape = self._interception.tape
        self.peak_bytes = 0

    def replay(self, wanted: Mapping[str, torch.Tensor], deliver: Callable[[str, torch.Tensor], None]) -> None:
        """Compute the values of recorded tensors and deliver them, each as early as possible.

        Memory that no operation filled (``torch.empty`` alone) is zero. Every rank must call this.

        Afterwards each generator that nobody moved since it was recorded stands where a plain build leaves it; one
        that was moved (seeded, or drawn from) stays where it is.

        Args:
            wanted: The tensors by name: parameters, buffers, optimizer state made from them. A name may stand for the
                same tensor as another, or for one over the same storage; a tensor that has values is delivered as
                it is.
            deliver: Called once for each name with a tensor on the device it was built on. It may keep the tensor.

        Raises:
            CannotReplay: When a tensor was filled in a way that no operation shows, or ranks recorded different
                programs.
        """
        receivers: dict[Value, list[tuple[str, View]]] = {}
        constants: dict[str, torch.Tensor] = {}
        for name, tensor in wanted.items():
            if not intercepted(tensor):
                constants[name] = tensor
                continue
            if tensor.fake_mode is not self._interception:
                raise CannotReplay(f"{name!r} belongs to another recording; replay that one for it")
            view = self._tape.view(tensor, f"the replay of {name!r}")
            assert view.value is not None
            receivers.setdefault(view.value, []).append((name, view))
        positions = {stream: stream.find() for stream in self._tape.streams.values()}
        ends = {stream: position for stream, position in positions.items() if position is not None}
        replay = Replay(receivers, deliver, ends=ends.values(), landmarks=self._tape.landmarks)
        if self.coordinator is not None and self.coordinator.world_size > 1:
            # Not what is replayed: where a rank's generators end, and which values it has read, may differ.
            check_agreement(program(receivers), constants, self.coordinator)
        for name, tensor in constants.items():
            deliver(name, tensor.detach())
        replay.run()
        self.peak_bytes = replay.peak_bytes
        for stream, position in ends.items():
            stream.arrive(position)

    def goes_on(self) -> bool:
        """Return whether the generator is still as this recording left it, its numbers not yet drawn."""
        position = self._tape.stream(torch.default_generator).find()
        return position is not None and position.state is None

    def is_blank(self, tensor: torch.Tensor) -> bool:
        """Return whether nothing was ever written into one of its tensors."""
        return self._tape.value(tensor, "setup").producer is None

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Record what is built inside."""
        try:
            with self._interception, Values(), replaced_trunc_normal(_recorded), loading_values():
                yield
        finally:
            self._tape.landmarks |= {stream.leave() for stream in self._tape.streams.values()}


@contextlib.contextmanager
def record(coordinator: Coordinator | None = None, *, after: Recording | None = None) -> Iterator[Recording]:
    """Build modules without the memory of their values inside this block.

    Constructors run as always, on tensors that claim to be on the CPU and have no values. No random number is drawn:
    after the block, and until the replay, the generator stands in a state derived from the one it had, so numbers
    drawn in between are as reproducible as ever but not those that follow a plain build. A block inside another one
    belongs to it.

    With several ranks rank 0's generator counts, as it is rank 0's weights that plain data-parallel training
    broadcasts.

    Args:
        coordinator: The ranks that build the same modules; None for one process.
        after: The recording of the module built before this one. If no replay came between, its numbers come first,
            as in a plain program, and this block goes on in it.

    Yields:
        The recording, to be replayed after sharding.

    Example:
        >>> with record() as recording:
        ...     layer = torch.nn.Linear(2, 3)
        >>> values = {}
        >>> recording.replay(dict(layer.named_parameters()), values.__setitem__)
        >>> {name: tuple(value.shape) for name, value in sorted(values.items())}
        {'bias': (3,), 'weight': (3, 2)}
    """
    with unset_fake_temporarily() as active:
        outer = active.owner if isinstance(active, Interception) else None
    if isinstance(outer, Recording):
        yield outer
        return
    own = torch.get_rng_state()
    shared = own if coordinator is None else coordinator.broadcast_object(own)
    torch.set_rng_state(shared)
    recording = after if after is not None and after.goes_on() else Recording(coordinator)
    try:
        with recording.block():
            yield recording
    finally:
        if not torch.equal(own, shared):
            # This rank's later numbers are its own; only the module's are rank 0's.
            torch.set_rng_state(own)


def is_recorded(tensor: object) -> bool:
    """Return whether something is a tensor without values.

    Example:
        >>> with record():
        ...     weight = torch.ones(2)
        >>> is_recorded(weight), is_recorded(torch.ones(2))
        (True, False)
    """
    return intercepted(tensor)


def is_blank(tensor: torch.Tensor) -> bool:
    """Return whether something is a tensor without values into which nothing was ever written.

    Example:
        >>> with record():
        ...     weight = torch.empty(2)
        ...     before = is_blank(weight)
        ...     weight.fill_(1.0).shape
        torch.Size([2])
        >>> before, is_blank(weight)
        (True, False)
    """
    return intercepted(tensor) and tensor.numel() > 0 and recording_of(tensor).is_blank(tensor)


def recording_of(tensor: torch.Tensor) -> Recording:
    """Return the recording that knows how to compute the values of a tensor without values."""
    assert intercepted(tensor)
    assert isinstance(tensor.fake_mode, Interception)
    owner = tensor.fake_mode.owner
    assert isinstance(owner, Recording)
    return owner


def _recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not intercepted(tensor) or tensor.is_meta:
            return original(tensor, *args, **kwargs)
        assert isinstance(tensor.fake_mode, Interception)
        return tensor.fake_mode.initialise(original, tensor, *args, **kwargs)

    return initialise
