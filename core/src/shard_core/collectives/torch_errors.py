"""Saying what torch's error about another rank means."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from shard_core.errors import CollectiveError


@contextlib.contextmanager
def translate_torch_errors(what: str) -> Iterator[None]:
    """Translate what torch raises in messages between ranks, and nothing else is sent there: it is about another rank.

    Args:
        what: The kind of message, such as "a reduction".

    Raises:
        CollectiveError: If the message failed.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).split("\n", 1)[0].rstrip(".")
        raise CollectiveError(
            f"rank {dist.get_rank()} waited in {what} in vain: {reason}; a rank that has died or left tells why in its "
            "own output."
        ) from error
