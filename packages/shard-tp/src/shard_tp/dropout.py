"""Random numbers on split activations: each rank of a tensor-parallel group draws its own."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch import nn

from shard_core.backend import ForwardContexts

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def draw_apart(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the ranks of a group draw different random numbers inside a module, and the same ones after it.

    A number drawn from the generator that is alike on all ranks seeds each rank's own. So all that is drawn follows
    from the generator outside: a checkpoint of that resumes it, and activations that are computed again in backward
    get the masks they had.

    Args:
        module: Works on activations that are split over the ranks, such as dropout between a colwise and a rowwise
            layer.
        mesh: The tensor-parallel ranks.
    """
    if isinstance(module, nn.Identity):
        return  # PEFT's dropout of probability 0, which plain PyTorch draws nothing for
    rank = mesh.get_local_rank()

    def seeded(module: nn.Module) -> contextlib.ExitStack:
        contexts = contextlib.ExitStack()
        if module.training and getattr(module, "p", None) != 0:
            seed = int(torch.randint(2**62, ()))
            devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
            contexts.enter_context(torch.random.fork_rng(devices))
            torch.manual_seed(seed + rank)
        return contexts

    ForwardContexts(seeded).hook(module)
