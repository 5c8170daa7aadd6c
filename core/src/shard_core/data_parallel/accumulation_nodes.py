"""The nodes at which graphs end: a parameter whose dtype or device changes gets another, where no wrapper listens."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch.autograd.graph import get_gradient_edge

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch


class AccumulationNodes:
    """The nodes of some parameters, by which ``DistributedDataParallel`` hears of their gradients.

    Args:
        parameters: Leaves that are trained.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._nodes = {parameter: get_gradient_edge(parameter).node for parameter in parameters}
        self._memory = {parameter: weakref.ref(parameter.untyped_storage()) for parameter in self._nodes}
        self._left = False

    @property
    def left(self) -> bool:
        """Whether some parameter has left its node: ``module.bfloat16()`` makes all do, ``float()`` brings none back.

        Asked where all parameters are trained. Nodes are compared only where the memory is another one: to ask for one
        takes ten times as long.
        """
        moved = [each for each, memory in self._memory.items() if memory() is not each.untyped_storage()]
        for parameter in () if self._left else moved:
            self._memory[parameter] = weakref.ref(parameter.untyped_storage())
            self._left = self._left or get_gradient_edge(parameter).node is not self._nodes[parameter]
        return self._left
