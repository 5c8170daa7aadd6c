"""The one device of this process, whatever number DeepSpeed takes for it, and variables that it reads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

#: The environment's variable by which tests see float16 parameters on a CPU.
FLOAT16_ON_CPU = "SHARD_DEEPSPEED_FLOAT16_ON_CPU"


def accelerator() -> Any:
    """Return what DeepSpeed, once imported, reaches devices through."""
    from deepspeed.accelerator import get_accelerator

    return get_accelerator()


def allow_float16_on_cpu() -> None:
    """Have DeepSpeed train float16 parameters on a CPU, where tests without a GPU ask for it in the environment.

    Torch computes in float16 on every CPU, slowly; DeepSpeed refuses where there are no instructions for it.
    """
    from deepspeed.accelerator import set_accelerator

    if os.environ.get(FLOAT16_ON_CPU) and not accelerator().is_fp16_supported():
        set_accelerator(_with_float16(accelerator()))


def _with_float16(accelerator: Any) -> Any:
    kind: Any = type(accelerator)

    class WithFloat16(kind):  # type: ignore[misc]  # which class it is depends on the machine
        """Says that it computes in float16."""

        def is_fp16_supported(self) -> bool:
            return True

        def supported_dtypes(self) -> list[torch.dtype]:
            return [*super().supported_dtypes(), torch.float16]

    return WithFloat16()


@contextlib.contextmanager
def own_device(device: torch.device) -> Iterator[None]:
    """Show DeepSpeed this process's device alone: it takes LOCAL_RANK for its number, at setup and in forwards.

    Args:
        device: This rank's.
    """
    from deepspeed.accelerator import set_accelerator

    if device == torch.device(device.type):  # it has no number
        yield
        return
    before = accelerator()
    set_accelerator(_of_one_device(before, device.index))
    try:
        yield
    finally:
        set_accelerator(before)


def _of_one_device(accelerator: Any, index: int) -> Any:
    kind: Any = getattr(accelerator, "of_many", type(accelerator))

    class OfOneDevice(kind):  # type: ignore[misc]  # which class it is depends on the machine
        """Reaches one device, whatever number it is asked for."""

        of_many = kind

        def device_name(self, device_index: Any = None) -> Any:
            return super().device_name(None if device_index is None else index)

        def set_device(self, device_index: Any) -> Any:
            del device_index
            return super().set_device(index)

    return OfOneDevice()


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Set a variable for a moment, unless it is set."""
    there = name in os.environ
    os.environ.setdefault(name, value)
    try:
        yield
    finally:
        if not there:
            del os.environ[name]
