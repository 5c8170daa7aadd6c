"""Assigned data: ``parameter.data = other`` reaches the shard of a DTensor, where torch changes its outside alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from shard_core._versions import read_shards_anew, set_local_tensor
from shard_core.errors import SetupError

_torch_data: Any = torch.Tensor.data  # a descriptor, which torch annotates as what it returns


class AssignedData:
    """Notices that a module's parameters may have been assigned other data, which its units have to read.

    Args:
        module: One that was sharded.
    """

    _assignments = 0
    _readings = 0

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._seen = self._assignments
        if "data" not in vars(DTensor):  # torch's is the one of all tensors; what is read stays that
            DTensor.data = property(_torch_data.__get__, _assign)  # type: ignore[assignment]

    @property
    def pending(self) -> bool:
        """Whether some DTensor was assigned other data since units have read theirs."""
        return self._seen != self._assignments

    def take_in(self) -> None:
        """Have the module's units, which are not gathered, read what their shards are now."""
        self._seen = self._assignments
        AssignedData._readings += 1
        read_shards_anew(self._module)

    def take_in_called(self, part: torch.nn.Module) -> None:
        """Have a part that is about to be gathered read its shards: the call around it may have assigned data."""
        if self.pending:  # until that call has ended: what it assigns to others is theirs to read
            read_shards_anew(part)

    @classmethod
    def count(cls) -> int:
        """Count assignments to all DTensors, and when units have read them: the same on every rank."""
        return cls._assignments + cls._readings

    @classmethod
    def note(cls) -> None:
        """Note that a DTensor was assigned other data."""
        cls._assignments += 1


def _assign(tensor: DTensor, other: torch.Tensor) -> None:
    """Assign a DTensor other data: a DTensor of any layout, or a whole tensor that is the same on all ranks.

    Raises:
        SetupError: If a whole tensor has another shape.
    """
    if not isinstance(other, DTensor):
        if other.shape != tensor.shape:
            raise SetupError(
                f"a parameter of shape {tuple(tensor.shape)} that is spread over ranks was assigned data of shape "
                f"{tuple(other.shape)}; assign a whole tensor of its own shape, or a DTensor."
            )
        other = distribute_tensor(other.contiguous(), tensor.device_mesh, tensor.placements, src_data_rank=None)
    elif other.placements != tensor.placements:
        other = other.redistribute(tensor.device_mesh, tensor.placements)
    _torch_data.__set__(tensor, other)
    set_local_tensor(tensor, other)
    AssignedData.note()
