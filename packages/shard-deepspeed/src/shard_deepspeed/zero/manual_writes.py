"""Values that users write into a module's own parameters, or into the parts of them that optimizers step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from shard_core import SetupError
from shard_deepspeed import _versions
from shard_deepspeed.zero.stepped_values import SteppedValues

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from shard_core.backend import Collectives, FlatPart
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
        place: Where the parameter's values stood then; None where they were away.
        lost: Whether it was written to while nothing of it was in the module, and gathered since.
    """

    name: str
    parameter: torch.Tensor
    part: FlatPart
    published: tuple[int, int, int] = (0, 0, 0)
    place: int | None = None
    lost: bool = False

    def note_published(self) -> None:
        """Note that parameter and part are the same now."""
        self.published = self.written()
        self.place = None if _versions.is_away(self.parameter) else self.parameter.data_ptr()

    @property
    def is_elsewhere(self) -> bool:
        """Whether the parameter was given other data since, which it shows now."""
        return self.place not in (None, self.parameter.data_ptr()) and not _versions.is_away(self.parameter)

    def written(self) -> tuple[int, int, int]:
        """Return how often the parameter, its shard and the part have been written to."""
        shard = _versions.shard_of(self.parameter)
        values = self.part.values
        writes = values.writes() if isinstance(values, SteppedValues) else values._version
        return self.parameter._version, 0 if shard is None else shard._version, writes

    @property
    def part_is_written(self) -> bool:
        """Whether the part was written to since, through the optimizer's groups."""
        return self.written()[2] != self.published[2]

    @property
    def part_may_be_written(self) -> bool:
        """Whether it may have been, alike on all ranks of one program."""
        values = self.part.values
        return (isinstance(values, SteppedValues) and values.asked_for) or self.part_is_written

    def settle(self, *, in_step: bool = False) -> None:
        """Begin to watch the part anew.

        Args:
            in_step: Whether a step begins, after which it is published in any case.
        """
        if isinstance(self.part.values, SteppedValues):
            self.part.values.settle(in_step=in_step)


class ManualWrites:
    """Takes what users write into a module's parameters into the parts, and the other way, as if these were one.

    Args:
        layout: Of the module's parameters.
        held: Those of which this rank holds a part.
        collectives: Of all ranks.

    Attributes:
        computed: Whether a forward that a backward may follow has computed with the parts as they were published.
    """

    def __init__(self, layout: Partitions, held: Iterable[PartitionedParameter], collectives: Collectives) -> None:
        self._layout, self._collectives, self.computed = layout, collectives, False
        self._held = list(held)
        self._by_parameter = {id(each.parameter): each for each in self._held}
        self._away: list[PartitionedParameter] = []
        self.record()

    def record(self) -> None:
        """Record that module and parts are the same now."""
        for each in self._held:
            each.note_published()
            each.lost = False
            each.settle()
        self.computed = False

    def begin_step(self) -> None:
        """Watch parts no longer, until ``record``: a step writes to them."""
        for each in self._held:
            each.settle(in_step=True)

    def are_unpublished(self, among: Iterable[torch.Tensor] | None = None) -> bool:
        """Return whether a part of a parameter was written to on any rank since module and parts were the same.

        Ranks ask one another only where somebody may have written, in which programs are alike.

        Args:
            among: Which parameters to look at; None for all.
        """
        asked = self._held if among is None else self._of(among)
        if not self._layout.spreads or not any(each.part_may_be_written for each in asked):
            return False
        self._collectives.barrier("what was written through optimizer.param_groups")
        written = self._collectives.any_true(any(each.part_is_written for each in self._held))
        for each in () if written else self._held:  # who has only looked is not asked again
            each.settle()
        return written

    def check_shown(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        """Check that the module shows what parts hold, as a hook before its ``state_dict``.

        Raises:
            SetupError: If a part was written to since, and values are asked for, not parameters.
        """
        del module, prefix
        if self._layout.spreads and not keep_vars and any(each.part_is_written for each in self._held):
            raise SetupError(
                "parameters were written to through optimizer.param_groups, and the module has that from its next "
                "forward on, or its next step; call strategy.module_state_dict(model), which has it."
            )

    def check_published(self) -> None:
        """Check that a backward finds what its forward has computed with.

        Raises:
            SetupError: On every rank, if a part was written to since.
        """
        if self.computed and self.are_unpublished():
            raise SetupError(
                "parameters were written to through optimizer.param_groups between a forward and its backward, which "
                "would compute with other values than the forward has; write before the forward, or after the backward."
            )

    @torch.no_grad()
    def take(self) -> None:
        """Copy what was written since into the parts.

        Raises:
            SetupError: If a parameter was written to that was not there, or that was written to as a part, too.
        """
        self._check_one_way()
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
                _take(beside, each.part.values if rewritten else _uncounted(each.part.values))
                each.note_published()

    def _check_one_way(self) -> None:
        """Check that what was written to the module is not missing what was written to parts."""
        both = [each for each in self._held if each.part_may_be_written and self._is_rewritten(each)]
        if both and self._collectives.any_true(any(each.part_is_written for each in both)):
            raise SetupError(
                f"{both[0].name!r} was written to both in the module and through optimizer.param_groups since the last "
                "forward or step, and neither has what the other has; write to one of the two."
            )

    def _is_rewritten(self, each: PartitionedParameter) -> bool:
        """Return whether a parameter was written to where its part does not stand."""
        counted = each.parameter._version != each.published[0]
        moved = each.is_elsewhere if self._layout.lets_go else self._layout.moved(each.parameter)
        return moved or (counted and not self._layout.shares(each.parameter))

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

    def _of(self, parameters: Iterable[torch.Tensor]) -> list[PartitionedParameter]:
        found = (self._by_parameter.get(id(parameter)) for parameter in parameters)
        return [each for each in found if each is not None]

    def _note_away(self, submodule: torch.nn.Module, *_: object) -> None:
        self._away = [each for each in self._of(_versions.gathered_for(submodule)) if _versions.is_away(each.parameter)]

    def _note_lost(self, submodule: torch.nn.Module, *_: object) -> None:
        """Note what was written to while it was away, which is refused when writes are taken next."""
        del submodule
        for each in self._away:
            each.lost = each.lost or each.parameter._version != each.published[0]

    @torch.no_grad()
    def _keep(self, submodule: torch.nn.Module, *_: object) -> None:
        for each in self._of(_versions.gathered_for(submodule)):
            parameter, values = each.parameter, each.part.values
            counted = parameter._version != each.published[0]
            # Who wrote to the part alone, through the optimizer's groups, means the part.
            may_be_assigned = parameter.device == values.device and not each.part_is_written
            if each.lost or _versions.is_away(parameter) or not (counted or may_be_assigned):
                continue
            own = self._layout.beside(parameter, each.part, strayed=False)
            if own is not None:
                # Data that a forward assigns is not counted; looking whether it did would have the host wait.
                _take(own, values if counted else _uncounted(values))
                each.place = parameter.data_ptr()
            if counted:
                each.published = each.written()


def _uncounted(values: torch.Tensor) -> torch.Tensor:
    return values.uncounted() if isinstance(values, SteppedValues) else values.data


def _take(written: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values; where they are the part's own, rounded, the part keeps its finer ones."""
    if written.dtype == values.dtype:
        values.copy_(written)
    else:
        values.copy_(torch.where(written == values.to(written.dtype), values, written.to(values.dtype)))
