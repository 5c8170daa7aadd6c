"""Values that users write into a module's own parameters, beside the parts that optimizers step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shard_core import SetupError
from shard_deepspeed import _versions

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

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
        lost: Whether it was written to while nothing of it was in the module, and gathered since.
    """

    name: str
    parameter: torch.Tensor
    part: FlatPart
    published: tuple[int, int, int] = (0, 0, 0)
    lost: bool = False

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
        self._away: list[PartitionedParameter] = []
        self.record()

    def record(self) -> None:
        """Record that module and parts are the same now."""
        for each in self._held:
            each.published, each.lost = each.written(), False

    def check_published(self) -> None:
        """Check that a forward has computed with what parts hold.

        Raises:
            SetupError: If a part was written to since the last step, which alone brings it to the module.
        """
        for each in self._held if self._layout.spreads else ():
            if each.written()[2] != each.published[2]:
                raise SetupError(
                    f"this rank's part of {each.name!r} was written to since the last step, through "
                    "optimizer.param_groups, and the forward has computed without that; write to the module's "
                    "parameters, or to parts between the last backward of a step and strategy.optimizer_step."
                )

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

    def watch(self, submodule: torch.nn.Module) -> list[RemovableHandle]:
        """Register hooks that copy what a submodule's forward writes, before its parameters are let go of.

        Returns:
            What removes them.
        """
        # Around DeepSpeed's own, which gather and let go.
        return [
            submodule.register_forward_pre_hook(self._note_away, prepend=True),
            submodule.register_forward_pre_hook(self._note_lost),
            submodule.register_forward_hook(self._keep, prepend=True),
        ]

    def _of(self, submodule: torch.nn.Module) -> list[PartitionedParameter]:
        found = (self._by_parameter.get(id(parameter)) for parameter in _versions.gathered_for(submodule))
        return [each for each in found if each is not None]

    def _note_away(self, submodule: torch.nn.Module, *_: object) -> None:
        self._away = [each for each in self._of(submodule) if _versions.is_away(each.parameter)]

    def _note_lost(self, submodule: torch.nn.Module, *_: object) -> None:
        """Note what was written to while it was away, which is refused when writes are taken next."""
        del submodule
        for each in self._away:
            each.lost = each.lost or each.parameter._version != each.published[0]

    @torch.no_grad()
    def _keep(self, submodule: torch.nn.Module, *_: object) -> None:
        for each in self._of(submodule):
            parameter, values = each.parameter, each.part.values
            counted = parameter._version != each.published[0]
            # Who wrote to the part alone, through the optimizer's groups, means the part.
            may_be_assigned = parameter.device == values.device and values._version == each.published[2]
            if each.lost or _versions.is_away(parameter) or not (counted or may_be_assigned):
                continue
            own = self._layout.beside(parameter, each.part, strayed=False)
            if own is not None:
                # Data that a forward assigns is not counted; looking whether it did would have the host wait.
                _take(own, values if counted else values.data)
            if counted:
                each.published = each.written()


def _take(written: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values; where they are the part's own, rounded, the part keeps its finer ones."""
    if written.dtype == values.dtype:
        values.copy_(written)
    else:
        values.copy_(torch.where(written == values.to(written.dtype), values, written.to(values.dtype)))
