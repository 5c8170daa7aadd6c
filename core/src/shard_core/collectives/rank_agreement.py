"""What ranks tell each other before they send gradients, or gather parameters: whether they come to the same."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from shard_core.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.collectives.interface import Collectives


def check_called_alike(name: str, collectives: Collectives, advice: str = "") -> None:
    """Check that all ranks come to the same part of a module; every rank calls this, with one small message.

    It is for engines that send or gather as the parts of a module run: ranks that run different ones wait for each
    other for good, or take one part's parameters for another's of the same size without a word.

    Args:
        name: What this rank comes to, as it is to be called in a sentence.
        collectives: Of all ranks.
        advice: What users may do beside calling the same on every rank or leaving for ``'ddp'``.

    Raises:
        SetupError: On every rank, if ranks come to different ones.
    """
    _compare(name, [], collectives, advice)


def check_used_alike(
    used: Sequence[tuple[str, bool]],
    collectives: Collectives,
    advice: str = "",
    *,
    at: str = "a comparison of gradients",
) -> None:
    """Check that losses have used the same parameters on every rank; every rank calls this, with one small message.

    Where nothing is listed, as after a deferred backward, nothing is sent.

    It is for engines that send the gradients of several parameters as one. These are added up by their places in it,
    so where ranks have put other ones of the same sizes there, they are mixed up, and no engine notices.

    Args:
        used: Each parameter's name, and whether it has a gradient; the same parameters in the same order on every rank.
        collectives: Of all ranks.
        advice: What users may do beside using the same on every rank or leaving for ``'ddp'``.
        at: Where this rank is, as ``check_called_alike`` names it on ranks that are elsewhere.

    Raises:
        SetupError: On every rank, if ranks have used different ones, or are elsewhere.
    """
    if not used:
        return
    mine = [(place, name) for place, (name, is_used) in enumerate(used) if is_used]  # a name may be listed twice
    everyone = _compare(at, mine, collectives, advice)
    differing = ((rank, each) for rank, own in enumerate(everyone) for each in own if not _is_in_all(each, everyone))
    rank, (_, name) = next(differing, (0, (0, "")))
    if name:
        raise SetupError(
            f"the loss of rank {rank} has used {name!r} and those of other ranks have not; this strategy "
            "sends gradients of several parameters as one message, where they would be mixed up: let every rank's loss "
            f"use it, were it times zero, {advice}or train under 'ddp' with find_unused_parameters=True."
        )


def _is_in_all(pair: tuple[int, str], everyone: Sequence[Sequence[tuple[int, str]]]) -> bool:
    return all(pair in own for own in everyone)


def _compare(
    name: str, used: list[tuple[int, str]], collectives: Collectives, advice: str
) -> Sequence[Sequence[tuple[int, str]]]:
    """Return what each rank has used, or nothing if that is the same; the digests alone are sent until it is not."""
    if collectives.world_size == 1:
        return []
    digest = int.from_bytes(hashlib.blake2b(repr((name, used)).encode(), digest_size=7).digest())
    most, least = collectives.all_reduce(torch.tensor([digest, -digest]), reduce_op="max").tolist()
    if most + least == 0:
        return []
    names, everyone = zip(*collectives.gather_objects((name, used)), strict=True)
    rank = next((rank for rank, each in enumerate(names) if each != names[0]), None)
    if rank is None:
        return everyone
    raise SetupError(
        f"ranks run different parts of a module, and would wait for each other: rank 0 comes to {names[0]} where rank "
        f"{rank} comes to {names[rank]}; call the same on every rank, were its output times zero, {advice}or train "
        "under 'ddp' with find_unused_parameters=True."
    )
