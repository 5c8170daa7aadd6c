"""Second derivatives do not pass split layers: torch adds up a gradient over ranks there by what has no derivative."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from shard_core import SetupError
from shard_core.backend import on_created_graph

if TYPE_CHECKING:
    from torch import nn


def refuse_second_derivatives(module: nn.Module) -> None:
    """Refuse graphs of gradients that come through a module's split layers; what is made of them would be a constant.

    Args:
        module: One that was split, and not yet sharded.
    """
    for name, part in module.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in part.parameters(recurse=False)):
            part.register_forward_hook(_Refusal(name))


class _Refusal:
    """A hook on a split layer's forward.

    Args:
        name: The layer's.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Watch for a backward that creates a graph; what is compiled is not watched."""
        del module, args
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            on_created_graph(output, self._refuse)

    def _refuse(self) -> NoReturn:
        raise SetupError(
            f"a gradient with create_graph=True comes through {self._name!r}, which is split over ranks: its "
            "derivative would be wrong there; take 'fsdp', or a plan that leaves such layers whole."
        )
