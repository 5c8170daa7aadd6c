"""Where shards live between uses: on the device, or in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy


def check_offload(value: Any) -> None:
    """Refuse what says nothing about offloading.

    Args:
        value: The option ``cpu_offload``.

    Raises:
        InvalidOption: If it is neither a bool nor one of torch's own objects.
    """
    if value is None or isinstance(value, bool):
        return
    from torch.distributed.fsdp import CPUOffload, OffloadPolicy

    if not isinstance(value, CPUOffload | OffloadPolicy):
        raise InvalidOption(
            f"cpu_offload is {value!r}; give True, False, or torch's CPUOffload, OffloadPolicy or CPUOffloadPolicy."
        )


def offload_policy(value: Any, device: torch.device) -> CPUOffloadPolicy | None:
    """Spell the option as ``fully_shard`` wants it.

    Args:
        value: The option ``cpu_offload``, checked.
        device: Where this rank computes. On the CPU there is nothing to copy to and memory is not pinned.

    Returns:
        The policy; None without offloading.
    """
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    if isinstance(value, CPUOffload):
        value = value.offload_params
    if not value or (value is not True and not isinstance(value, CPUOffloadPolicy)):
        return None
    pinned = value is True or value.pin_memory
    return CPUOffloadPolicy(pin_memory=pinned and device.type != "cpu")
