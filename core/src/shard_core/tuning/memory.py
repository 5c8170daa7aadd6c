"""The most memory that a rank holds during a step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from shard_core._versions import TorchDispatchMode

T = TypeVar("T")


def weigh(step: Callable[[], T], device: torch.device) -> tuple[list[T], int | None]:
    """Take two steps and measure the memory the second needs; they may take much longer than others.

    Args:
        step: Takes one.
        device: Where this rank computes.

    Returns:
        What the steps returned, and bytes: on CUDA what the allocator had given out at most, on the CPU the tensors
        alive at a time among those that steps touch; None on other devices, which cannot be asked.
    """
    if device.type == "cpu":
        with _LiveBytes() as live:
            first = step()  # meets what lives from step to step
            live.peak = 0
            return [first, step()], live.peak
    first = step()
    if device.type != "cuda":
        return [first, step()], None
    torch.cuda.reset_peak_memory_stats(device)
    return [first, step()], torch.cuda.max_memory_allocated(device)


class _LiveBytes(TorchDispatchMode):
    """Adds up, after each operation, the storages that operations have met and that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._storages: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([args, kwargs, result]):
            self._storages.add(tensor.untyped_storage())
        # Not counted up and down: an engine frees a storage by shrinking it, and it goes on living.
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self._storages))
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the plain tensors on the CPU in arguments, and inside tensors that stand for others."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            yield from _tensors([getattr(value, name) for name in value.__tensor_flatten__()[0]])
        elif value.device.type == "cpu":
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
