"""Checks that batches, and gradients of what each rank holds whole, agree on all ranks of a tensor-parallel group."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shard_core import CollectiveError, SetupError
from shard_core.backend import on_created_graph

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.backend import Collectives, LocalGradient

#: Integers of each size, to read any tensor's bits as numbers.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Far more than the order of a sum changes a gradient, and far less than a part differs from another part.
_TOLERANCE = 1e-2


class ConsistencyCheck:
    """Compares between the ranks of one group, at the price of one small message each time.

    Args:
        mesh: The tensor-parallel ranks, one axis.
        collectives: What all ranks talk through.
        device: This rank's.
    """

    def __init__(self, mesh: DeviceMesh, collectives: Collectives, device: torch.device) -> None:
        self._group = mesh.get_group()
        self._ranks = dist.get_process_group_ranks(self._group)
        self._collectives = collectives
        self._device = device

    def check_batch(self, batch: Any) -> None:
        """Refuse inputs that differ between ranks which must work on the same batch.

        Args:
            batch: What a forward was given.

        Raises:
            CollectiveError: If another rank of the group was given something else.
        """
        low, high = self._extremes(_marks(batch, self._device))
        if not torch.equal(low, high):
            raise CollectiveError(
                f"ranks {self._ranks} are one tensor-parallel group and were given different batches; give each the "
                "batch of its data-parallel rank, with process_dataloader() or distributed_sampler_kwargs."
            )

    def check_gradients(self, gradients: Mapping[str, LocalGradient]) -> None:
        """Refuse gradients that each rank of a group should have whole, and has only a part of.

        Args:
            gradients: This rank's, by name; those of parameters that are split over the group are skipped.

        Raises:
            SetupError: On all ranks, naming the first.
        """
        wholes = {name: each.tensor for name, each in gradients.items() if not self._splits(each)}
        different: list[str] = []
        if wholes:
            marks = [torch.stack([each.sum(dtype=torch.float64), each.double().norm()]) for each in wholes.values()]
            low, high = self._extremes(torch.stack(marks))
            differs = ((high - low).amax(1) > _TOLERANCE * high[:, 1]).tolist()
            different = [name for name, differ in zip(wholes, differs, strict=True) if differ]
        found = [name for names in self._collectives.gather_objects(different) for name in names]
        if found:
            raise SetupError(
                f"the gradient of {found[0]!r} differs between ranks of a tensor-parallel group, which each hold it "
                "whole: it meets activations that were split before it; end the split before it (colwise is ended by "
                "rowwise), split its module too, or, if it works on each head, give it the style "
                "'replicated_with_grad_allreduce'."
            )

    def _splits(self, gradient: LocalGradient) -> bool:
        return any(dist.get_process_group_ranks(group) == self._ranks for group in gradient.sharded_over)

    def _extremes(self, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the smallest and the largest of each number in the group, in one message."""
        both = self._collectives.all_reduce(torch.stack([-mine, mine]), self._group, "max")
        return -both[0], both[1]


def _marks(batch: Any, device: torch.device) -> torch.Tensor:
    """Sum a batch up in four numbers that no change of values, order or shape is likely to survive."""
    described: list[str] = []
    sums = torch.zeros(3, dtype=torch.int64, device=device)
    for value in _leaves(batch):
        if not isinstance(value, torch.Tensor):
            described.append(repr(value))
            continue
        described.append(f"{value.dtype}{tuple(value.shape)}")
        if value.numel() and value.layout is torch.strided:
            # Odd factors, so that tensors that change places change the sums, which may overflow.
            sums += (2 * len(described) + 1) * _sums(value.detach()).to(device)
    shape = torch.tensor([zlib.crc32(" ".join(described).encode())], device=device)
    return torch.cat([shape, sums])


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sum up the bits of a tensor; its rows, weighted by their places; its columns, weighted likewise."""
    words = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    words = words.contiguous().view(_WORDS[words.element_size()])
    words = words.flatten(1) if words.dim() > 1 else words.reshape(1, -1)
    rows, columns = words.sum(1, dtype=torch.int64), words.sum(0, dtype=torch.int64)
    return torch.stack([rows.sum(), _weighted(rows), _weighted(columns)])


def _weighted(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)).sum()


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors and numbers in a nested structure; other things may differ by right."""
    if isinstance(value, torch.Tensor):
        # What is distributed says itself how ranks share it.
        if not isinstance(value, DTensor):
            yield value
    elif isinstance(value, bool | int | float):
        yield value if not (isinstance(value, float) and math.isnan(value)) else "nan"
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _leaves(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name))


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
        on_created_graph(output, self._refuse)

    def _refuse(self) -> NoReturn:
        raise SetupError(
            f"a gradient with create_graph=True comes through {self._name!r}, which is split over ranks: its "
            "derivative would be wrong there; take 'fsdp', or a plan that leaves such layers whole."
        )
