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

    def seeded(module: nn.Module) -> contextlib.AbstractContextManager[None]:
        if not module.training or getattr(module, "p", None) == 0:
            return _Seeded(None, mesh.device_type)
        return _Seeded(int(torch.randint(2**62, ())) + rank, mesh.device_type)

    ForwardContexts(seeded, _Seeded.leave_late).hook(module)


class _Seeded(contextlib.AbstractContextManager[None]):
    """Draws random numbers from a seed, and goes on with the generators of before.

    Args:
        seed: This rank's; None to draw from the generators themselves.
        device_type: Where modules run.
    """

    def __init__(self, seed: int | None, device_type: str) -> None:
        self._seed = seed
        self._on_gpu = device_type == "cuda"
        self._states: list[torch.Tensor] = []

    def __enter__(self) -> None:
        if self._seed is not None:
            self._states = [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if self._on_gpu else [])]
            torch.manual_seed(self._seed)

    def __exit__(self, *exception: object) -> None:
        if self._seed is not None:
            torch.set_rng_state(self._states[0])
            for state in self._states[1:]:
                torch.cuda.set_rng_state(state)

    def leave_late(self) -> None:
        """Leave it, unless somebody has seeded the generators anew since."""
        if self._seed is not None and torch.initial_seed() == self._seed:
            self.__exit__()
