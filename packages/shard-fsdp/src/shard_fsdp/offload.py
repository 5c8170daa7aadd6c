"""Where shards live between uses: on the device, or in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    import torch


def check_offload(value: Any) -> None:
    """Refuse what says nothing about offloading.

    Args:
        value: The option ``cpu_offload``, neither None nor a bool.

    Raises:
        InvalidOption: If it is none of torch's own objects.
    """
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
    if isinstance(value, CPUOffload):
        value = value.offload_params
    if value is True:
        value = CPUOffloadPolicy()
    if not isinstance(value, CPUOffloadPolicy):
        return None
    return CPUOffloadPolicy(pin_memory=value.pin_memory and device.type != "cpu")
