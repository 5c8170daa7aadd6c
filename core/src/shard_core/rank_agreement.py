"""What ranks tell each other of their losses before they send gradients."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from shard_core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.collectives.interface import Collectives


def check_used_alike(used: Sequence[tuple[str, bool]], collectives: Collectives) -> None:
    """Check that losses have used the same parameters on every rank; every rank calls this, with one small message.

    Where nothing is listed, as after a deferred backward, nothing is sent.

    It is for engines that send the gradients of several parameters as one. These are added up by their places in it,
    so where ranks have put other ones of the same sizes there, they are mixed up, and no engine notices.

    Args:
        used: Each parameter's name, and whether it has a gradient; the same parameters in the same order on every rank.
        collectives: Of all ranks.

    Raises:
        SetupError: On every rank, if ranks have used different ones.
    """
    if collectives.world_size == 1 or not used:
        return
    mine = [[place, name] for place, (name, is_used) in enumerate(used) if is_used]  # a name may be listed twice
    digest = int.from_bytes(hashlib.blake2b(repr(mine).encode(), digest_size=7).digest())
    most, least = collectives.all_reduce(torch.tensor([digest, -digest]), reduce_op="max").tolist()
    if most + least == 0:
        return
    everyone = collectives.gather_objects(mine)
    rank, name = next(
        (rank, each[1])
        for rank, own in enumerate(everyone)
        for each in own
        if not all(each in theirs for theirs in everyone)
    )
    raise SetupError(
        f"the loss of rank {rank} has used {name!r} and those of other ranks have not; this strategy "
        "sends gradients of several parameters as one message, where they would be mixed up: let every rank's loss use "
        "it, were it times zero, or train under 'ddp' with find_unused_parameters=True."
    )
