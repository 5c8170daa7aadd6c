"""Bytes of any length exchanged over a process group."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from shard_core.errors import CollectiveError


def gather_bytes(data: bytes, device: torch.device) -> list[memoryview]:
    """Return every rank's bytes, in rank order; every rank calls this.

    Args:
        data: This rank's.
        device: From where the backend carries tensors.
    """
    ranks = dist.get_world_size()
    lengths = torch.empty(ranks, 1, dtype=torch.int64, device=device)
    dist.all_gather(list(lengths.unbind(0)), torch.tensor([len(data)], device=device))
    sizes = _checked(lengths)
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=device)
    padded[: len(data)] = _tensor(data)
    rows = padded.new_empty(ranks, len(padded))
    dist.all_gather(list(rows.unbind(0)), padded)
    return [_view(row)[:size] for row, size in zip(rows.cpu().unbind(0), sizes, strict=True)]


def broadcast_bytes(data: bytes, src: int, device: torch.device) -> memoryview:
    """Return one rank's bytes; every rank calls this.

    Args:
        data: What rank ``src`` sends; of no importance elsewhere.
        src: Who sends.
        device: From where the backend carries tensors.
    """
    length = torch.tensor([len(data)], device=device)
    dist.broadcast(length, src)
    (size,) = _checked(length)
    sends = dist.get_rank() == src
    sent = _tensor(data).to(device) if sends else torch.empty(size, dtype=torch.uint8, device=device)
    dist.broadcast(sent, src)
    return _view(sent.cpu())


def _checked(lengths: torch.Tensor) -> list[int]:
    sizes: list[int] = lengths.flatten().tolist()
    if min(sizes) < 0:
        raise CollectiveError(f"a rank announced a message of {min(sizes)} bytes; let nobody else reach their ports.")
    return sizes


def _tensor(data: bytes) -> torch.Tensor:
    # A copy: torch warns of memory that must not be written to.
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _view(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data
