"""Which rank has which CUDA device: NCCL takes one rank for each, and waits or speaks of itself where two share one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shard_core.errors import CollectiveError

if TYPE_CHECKING:
    import torch.distributed as dist

    from shard_core.collectives.roll_call import RollCall


def check_one_rank_per_device(store: dist.Store, rank: int, device: torch.device, roll_call: RollCall) -> None:
    """Check that no two ranks have one device; every rank calls this, with its device set.

    A device is known by what it is: each task of a scheduler may see its own as number 0.

    Args:
        store: Keys for these claims alone.
        rank: This process's place.
        device: This rank's.
        roll_call: Where ranks wait for one another.

    Raises:
        CollectiveError: On every rank, if two have one device.
    """
    identity = str(torch.cuda.get_device_properties(device).uuid)
    first = store.compare_set(f"device/{identity}", "", str(rank)).decode(errors="replace")
    if first != str(rank):
        store.set(
            "shared",
            f"ranks {first} and {rank} have one device, {device} of rank {rank}, and NCCL takes one rank for each; "
            "start at most one rank per device, let the scheduler bind one to each task, or give "
            "process_group_backend='gloo'.",
        )
    roll_call.answer("the claim of devices")  # after this no rank writes
    if store.check(["shared"]):
        raise CollectiveError(store.get("shared").decode(errors="replace"))
