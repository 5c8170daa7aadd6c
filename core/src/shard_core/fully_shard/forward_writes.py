"""What a forward writes to weights goes to gathered copies: it is written to the shards before those are freed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shard_core._versions import gathered_for, is_gathered, set_local_tensor, tree_leaves, version_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.fully_shard.units import Unit


class ForwardWrites:
    """Writes to a module's shards what its forwards have written to weights, as momentum encoders and clamps do.

    A write is noticed by the tensor's count of changes, or by other memory behind it. Torch counts no write through
    ``parameter.data`` in place; these are looked for in the first forward of each part of a unit, value by value, and
    what was written to there is taken to be written to in every forward of that part.

    Activation checkpointing runs again in backward what it wraps, and writes once more. That is taken where a part ends
    again, and when a gradient of the unit, or of what a part was called with, has come, before the unit frees what was
    written to.

    Args:
        module: One that was sharded.
        units: Its units, without the root's.
        mesh: The data-parallel ranks; the last axis shards.
    """

    def __init__(self, module: nn.Module, units: Sequence[Unit], mesh: DeviceMesh) -> None:
        self._place, self._ranks = mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1)
        self._seen: dict[torch.Tensor, _Gathered] = {}
        self._compared: set[nn.Module] = set()
        self._outdated: dict[nn.Module, set[torch.Tensor]] = {}
        self._followed: set[torch.Tensor] = set()
        self._units = {first: first for first in [module, *(unit.modules[0] for unit in units)]}
        self._units |= {part: unit.modules[0] for unit in units for part in unit.modules}
        # No graph may hold the hooks, as none holds torch's own, and no hook may become a graph of its own.
        begin, end = torch.compiler.disable(self._begin), torch.compiler.disable(self._end)
        for part in self._units:
            part.register_forward_pre_hook(begin)
            # Before torch's own, which frees what was written to; activation checkpointing may end by an exception what
            # it runs again, once it has what it needs.
            part.register_forward_hook(end, prepend=True, always_call=True, with_kwargs=True)

    def take(self) -> None:
        """Take what was written to what is gathered just now, between a forward and its backward, say.

        What is written uncounted is left out: the forward's end has taken it, and shards may have changed since.
        """
        for unit in set(self._units.values()):
            if is_gathered(unit):
                self._take(unit)

    def begin(self, unit: nn.Module, part: nn.Module) -> None:
        """Begin to watch what a unit has gathered for a call.

        Args:
            unit: Its first module, or the whole module for the root's.
            part: What is called.
        """
        for tensor in gathered_for(unit):
            if tensor not in self._seen:
                self._seen[tensor] = _Gathered(tensor)
        if part not in self._compared and is_gathered(unit):
            self._outdated[part] = self._find_outdated(unit)

    def end(self, unit: nn.Module, part: nn.Module) -> None:
        """Take what a call has written.

        Args:
            unit: What was begun with.
            part: What was called.
        """
        if is_gathered(unit):
            self._take(unit, part)

    def _begin(self, part: nn.Module, args: Any) -> None:
        del args
        self.begin(self._units[part], part)

    def _end(self, part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        del output
        self.end(self._units[part], part)
        self._follow_inputs(self._units[part], (args, kwargs))

    @torch.no_grad()
    def _take(self, unit: nn.Module, part: nn.Module | None = None) -> None:
        """Take what was written; by a part, also what torch does not count."""
        compared = part is None or part in self._compared
        outdated: set[torch.Tensor] = set()
        if part is not None:
            self._compared.add(part)
            outdated = self._outdated.pop(part, outdated)
        for tensor, parameter in gathered_for(unit).items():
            seen = self._seen.get(tensor)
            if seen is None:
                continue
            written = seen.written() or part in seen.writers
            if not written and (compared or tensor in outdated):
                continue
            mine, shard = self._both(seen, parameter)
            if not written and part is not None and not _same(mine, shard):
                written = True
                seen.writers.add(part)
            if written and mine.numel():
                _write(mine.to(shard.device), shard)
            if written:
                seen.left = mine.clone() if seen.writers else None
                self._follow(unit, tensor)

    def _follow(self, unit: nn.Module, written: torch.Tensor) -> None:
        """Take from now on what is written to a parameter in backward, too, before its unit frees it."""
        if written in self._followed:
            return
        self._followed.add(written)
        for each in gathered_for(unit):  # its own gradient may never come
            if each.requires_grad:  # no graph may hold these hooks either
                each.register_post_accumulate_grad_hook(_Again(self, unit, written))

    def _follow_inputs(self, unit: nn.Module, inputs: Any) -> None:
        """Take what is written in backward from a unit without gradients, too: it is over once it has its inputs'."""
        if not self._followed or not torch.is_grad_enabled():
            return
        written = [each for each in gathered_for(unit) if each in self._followed]
        for tensor in tree_leaves(inputs) if written else ():
            if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                for each in written:
                    tensor.register_hook(_Again(self, unit, each))

    @torch.no_grad()
    def take_again(self, unit: nn.Module, tensor: torch.Tensor) -> None:
        """Take what was written while a forward ran again in backward.

        Args:
            unit: Its first module, or the whole module for the root's.
            tensor: A gathered parameter.
        """
        if not is_gathered(unit):  # nothing has run again since it was
            return
        seen, parameter = self._seen[tensor], gathered_for(unit)[tensor]
        mine, shard = self._both(seen, parameter)
        if not seen.written() and (seen.left is None or _same(mine, seen.left)):
            return
        seen.left = mine.clone() if seen.writers else None
        if mine.numel():
            _write(mine.to(shard.device), shard)

    @torch.no_grad()
    def _find_outdated(self, unit: nn.Module) -> set[torch.Tensor]:
        """Find what was gathered before its shard was changed: the call that is to come has not written that."""
        pairs = gathered_for(unit).items()
        return {each for each, parameter in pairs if not _same(*self._both(self._seen[each], parameter))}

    def _both(self, seen: _Gathered, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what of a gathered parameter is this rank's, and the shard it was gathered from."""
        return self._mine(seen), parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def _mine(self, seen: _Gathered) -> torch.Tensor:
        """Return what of a gathered parameter is this rank's."""
        rows = len(seen.own)
        each = -(-rows // self._ranks)
        start = min(self._place * each, rows)
        return seen.own.narrow(0, start, min(each, rows - start))


class _Gathered:
    """A gathered parameter.

    Attributes:
        own: The memory that its unit gathers it into.
        writers: The parts whose forwards write to it uncounted.
        left: This rank's part of it as those have left it, by which is seen what is written after them: shards may
            have been changed by hand since.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.own = _local(tensor)
        self.writers: set[nn.Module] = set()
        self.left: torch.Tensor | None = None
        self._tensor = tensor
        self._changes = self._count()

    def written(self) -> bool:
        """Return whether it was seen to be written to since this was last asked; ``own`` has the values then."""
        exchanged = _held(self._tensor).data_ptr() != self.own.data_ptr()
        if exchanged:
            self.own.copy_(_local(self._tensor))
            _exchange(self._tensor, self.own)
        before, self._changes = self._changes, self._count()
        return exchanged or before != self._changes

    def _count(self) -> tuple[int | None, ...]:
        held = _held(self._tensor)
        return version_of(self._tensor), None if held is self._tensor else version_of(held)


class _Again:
    """A hook on a gradient that takes what was written by then, if the module is still there."""

    def __init__(self, writes: ForwardWrites, unit: nn.Module, tensor: torch.Tensor) -> None:
        self._writes, self._unit, self._tensor = weakref.ref(writes), weakref.ref(unit), weakref.ref(tensor)

    def __call__(self, trained: torch.Tensor) -> None:
        del trained
        writes, unit, tensor = self._writes(), self._unit(), self._tensor()
        if writes is not None and unit is not None and tensor is not None:
            writes.take_again(unit, tensor)


def _held(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # else it shows a view
        return tensor.to_local()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a tensor, to be written to without being counted."""
    return _held(tensor).data


def _exchange(tensor: torch.Tensor, own: torch.Tensor) -> None:
    """Restore a parameter to its unit's memory."""
    if isinstance(tensor, DTensor):
        set_local_tensor(tensor, DTensor.from_local(own, tensor.device_mesh, tensor.placements, run_check=False))
    else:
        tensor.data = own


def _same(mine: torch.Tensor, shard: torch.Tensor) -> bool:
    return torch.allclose(mine, shard.to(mine.device, mine.dtype), rtol=0, atol=0, equal_nan=True)


def _write(values: torch.Tensor, shard: torch.Tensor) -> None:
    """Copy values; where they are the shard's own, rounded, it keeps its finer ones."""
    if values.dtype == shard.dtype:
        shard.copy_(values)
    else:
        shard.copy_(torch.where(values == shard.to(values.dtype), shard, values.to(shard.dtype)))
