"""Where shards live between uses: on the device, or in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    import torch


def checked_offload(value: Any) -> bool | CPUOffloadPolicy:
    """Refuse what says nothing about offloading, and bring the rest to what matters here.

    Args:
        value: The option ``cpu_offload``, neither None nor a bool.

    Returns:
        Whether to offload, or torch's policy for it, which also says whether memory is pinned.

    Raises:
        InvalidOption: If it is none of torch's own objects.
    """
    if not isinstance(value, CPUOffload | OffloadPolicy):
        raise InvalidOption(
            f"cpu_offload is {value!r}; give True, False, or torch's CPUOffload, OffloadPolicy or CPUOffloadPolicy."
        )
    if isinstance(value, CPUOffload):
        return bool(value.offload_params)
    return value if isinstance(value, CPUOffloadPolicy) else False


def offload_policy(value: object, device: torch.device) -> CPUOffloadPolicy | None:
    """Convert the option to what ``fully_shard`` takes.

    Args:
        value: The option ``cpu_offload``, checked.
        device: Where this rank computes. On the CPU there is nothing to copy to and memory is not pinned.

    Returns:
        The policy; None without offloading.
    """
    if not value:
        return None
    pins = value.pin_memory if isinstance(value, CPUOffloadPolicy) else True
    return CPUOffloadPolicy(pin_memory=pins and device.type != "cpu")
