"""What torch looks for under ``torch.xla``, as under ``torch.cuda``: how activation checkpointing keeps its generator.

``torch.utils.checkpoint`` asks the module of a tensor's device for that state; without one, every model that calls it
fails.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_initialized = True  # torch asks by this name whether there is a state to keep


def is_available() -> bool:
    """Return True: the module is registered once the device is in use."""
    return True


def is_initialized() -> bool:
    """Return True, for the same reason."""
    return True


def device_count() -> int:
    """Return 1: to torch a process has one XLA device."""
    return 1


def current_device() -> int:
    """Return the index of the only device."""
    return 0


def device(index: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context that changes nothing: there is no other device."""
    del index
    return contextlib.nullcontext()


def get_rng_state(device: Any = None) -> torch.Tensor:
    """Return the state of the device's generator."""
    del device
    from shard_xla.strategy import runtime

    return runtime.random_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Restore the state of the device's generator."""
    del device
    from shard_xla.strategy import runtime

    runtime.set_random_state(state)
