"""Values that users write into a module's own parameters, beside the parts that optimizers step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shard_core import SetupError
from shard_deepspeed import _versions

if TYPE_CHECKING:
    from shard_core.backend import FlatPart
    from shard_deepspeed.zero.partitions import Partitions


@dataclasses.dataclass(kw_only=True, eq=False)
class PartitionedParameter:
    """A parameter of which this rank holds a part.

    Attributes:
        name: The parameter's, in the module.
        parameter: The module's.
        part: What of it this rank holds.
        published: How often the parameter, its shard and the part had been written to when they last were
            the same.
    """

    name: str
    parameter: torch.Tensor
    part: FlatPart
    published: tuple[int, int, int] = (0, 0, 0)

    def written(self) -> tuple[int, int, int]:
        """Return how often the parameter, its shard and the part have been written to."""
        shard = _versions.shard_of(self.parameter)
        return self.parameter._version, 0 if shard is None else shard._version, self.part.values._version


class ManualWrites:
    """Takes what users write into a module's parameters into the parts, as if there were no parts.

    Args:
        layout: Of the module's parameters.
        held: Those of which this rank holds a part.
    """

    def __init__(self, layout: Partitions, held: Iterable[PartitionedParameter]) -> None:
        self._layout = layout
        self._held = list(held)
        self._by_parameter = {id(each.parameter): each for each in self._held}
        self.record()

    def record(self) -> None:
        """Record that module and parts are the same now."""
        for each in self._held:
            each.published = each.written()

    @torch.no_grad()
    def take(self) -> None:
        """Copy what was written since into the parts.

        Raises:
            SetupError: If a parameter was written to that was not there.
        """
        strayed = self._layout.strayed()
        for each in self._held:
            beside = self._layout.beside(each.parameter, each.part, strayed)
            away = _versions.is_away(each.parameter)
            if beside is None and not away:
                continue
            (own, shard, part), published = each.written(), each.published
            rewritten = own != published[0]
            if away and shard == published[1] and rewritten:
                raise SetupError(
                    f"{each.name!r} was written to between forwards, when its values are spread over ranks and nothing "
                    "of them is in the module; write to it inside deepspeed.zero.GatheredParameters([parameter], "
                    "modifier_rank=0), or take values from a file with strategy.load_weights."
                )
            # Who wrote to the part alone, through the optimizer's groups, means the part.
            if beside is not None and (rewritten or part == published[2]):
                # What was written through ``data`` is not counted. Nor is its copy, mostly of nothing new: a save in
                # the background would take it for a change.
                _take(beside, each.part.values if rewritten else each.part.values.data)
                each.published = each.written()

    @torch.no_grad()
    def keep(self, submodule: torch.nn.Module, *_: object) -> None:
        """Copy what a forward of a submodule has written, as a hook on it, before its parameters are let go of."""
        for parameter in _versions.gathered_for(submodule):
            each = self._by_parameter.get(id(parameter))
            if each is None or _versions.is_away(parameter) or parameter._version == each.published[0]:
                continue
            own = self._layout.beside(parameter, each.part, strayed=False)
            if own is not None:
                _take(own, each.part.values)
            each.published = each.written()


def _take(written: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values; where they are the part's own, rounded, the part keeps its finer ones."""
    if written.dtype == values.dtype:
        values.copy_(written)
    else:
        values.copy_(torch.where(written == values.to(written.dtype), values, written.to(values.dtype)))
