"""Buffers of modules under torch's DistributedDataParallel, sent before forwards rather than by the wrapper."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shard_core.collectives.process_group import translate_torch_errors


def sends_no_buffers() -> dict[str, bool]:
    """Return the keyword that keeps DistributedDataParallel from sending buffers, as this torch names it.

    In some versions they would count as changed in place, so that no backward could follow two forwards; in all it
    would send none after a forward that it did not get ready in.
    """
    newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    return {"forward_sync_buffers" if newer else "broadcast_buffers": False}


class BufferExchange:
    """Sends one module's buffers before each forward but those of evaluations, which one rank may run alone.

    These find what was sent after the step before them, when no graph is left that may read it. Whether something is
    to be sent follows from which forwards and steps there were, never from values, which ranks do not share.
    """

    def __init__(self) -> None:
        self._alike = True

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Send buffers, as a forward pre-hook that can be pickled with its module."""
        del args
        evaluates = not torch.is_grad_enabled() and not any(part.training for part in module.modules())
        if not (evaluates and self._alike):
            send_buffers(module)
        self._alike = evaluates

    def after_step(self, module: nn.Module) -> None:
        """Send what forwards have changed; every rank calls this."""
        if not self._alike:
            send_buffers(module)
        self._alike = True


@torch.no_grad()
def send_buffers(module: nn.Module) -> None:
    """Broadcast rank 0's buffers, unnoticed by backwards of earlier forwards, which may still read them.

    Args:
        module: The same on every rank but for values.
    """
    alike: dict[torch.dtype, list[torch.Tensor]] = {}
    for buffer in module.buffers():
        alike.setdefault(buffer.dtype, []).append(buffer.data)
    for buffers in alike.values():
        message = torch.cat([each.reshape(-1) for each in buffers])
        with translate_torch_errors("a broadcast of buffers"):
            dist.broadcast(message, src=0)
        parts: Iterable[torch.Tensor] = message.split([each.numel() for each in buffers])
        for each, part in zip(buffers, parts, strict=True):
            each.copy_(part.view_as(each))
