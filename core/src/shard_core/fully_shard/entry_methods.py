"""Entry methods: calls of what is inside a sharded module from other places than the module's forward."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.nn.utils.parametrize import ParametrizationList

from shard_core._versions import (
    COMPILED_CALL,
    begin_anew,
    deferred_shards,
    gathered_for,
    in_backward,
    is_coming,
    is_gathered,
    run_unit_hooks,
    running_backward,
    shard_versions,
    tree_leaves,
)
from shard_core.errors import SetupError
from shard_core.forward_calls import RunningCall, is_being_called, leave_alone, without_inference_mode
from shard_core.fully_shard.assigned_data import AssignedData
from shard_core.fully_shard.object_outputs import Shown
from shard_core.fully_shard.second_derivatives import SecondDerivatives
from shard_core.fully_shard.units import sharded_parts
from shard_core.preparation.replacement_check import ReplacementCheck

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from shard_core.fully_shard.forward_writes import ForwardWrites
    from shard_core.fully_shard.uneven_calls import UnevenCalls
    from shard_core.fully_shard.units import Unit

#: The forward method that is set on units, to run their hooks when a part of them has run.
PASS_ON = "_shard_pass_on"


def reshard(module: torch.nn.Module) -> None:
    """Free unsharded parameters: after a forward that no backward has followed, a unit may still show them.

    Args:
        module: One that was sharded.
    """
    for part in sharded_parts(module):
        part.reshard()


def drop_coming(module: torch.nn.Module) -> None:
    """Free what units have gathered ahead for calls that have not come: other ranks may have begun with it.

    Args:
        module: One that was sharded.
    """
    for part in sharded_parts(module):
        if is_coming(part):
            part.unshard()
            part.reshard()


class EntryMethods:
    """Gathers the unit around a submodule that a user's method calls, and has its gradients reduced.

    The engine does both around the forward of a unit. A method other than forward calls submodules one by one; each
    of them, if it runs while no forward does, is what the unit has to be gathered for. A hook on the submodules that
    hold parameters, or may read those inside them, costs two to three microseconds a call inside of another; the
    outermost call looks, besides, at all places of parameters, for about as long for each part that has some. What is
    compiled is not watched inside.

    A forward of the module without gradients leaves nothing gathered: no backward would free it, and what is changed
    by hand afterwards, in what is gathered, would be missing from the shards. What one with gradients leaves is freed
    by the next call, should no backward come before: shards may have been changed since. A method goes on with what
    methods have gathered, unless torch counts that a shard was written to; it counts no write through ``.data``.

    Args:
        module: A module that was sharded.
        units: Its units, inner ones before those around them.
        told: What is called before each such call, or the module's own, and once in each backward that comes to what
            one of them has returned.
        writes: Takes what such calls write to weights.
        uneven: Compares what ranks call.

    Attributes:
        second_derivatives: What notices graphs of gradients.
        in_parts: The first modules of units of which some part was called so, not the unit whole.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        units: Sequence[Unit],
        told: tuple[Callable[[], None], Callable[[], None]],
        writes: ForwardWrites,
        uneven: UnevenCalls,
    ) -> None:
        self.second_derivatives = SecondDerivatives(module)
        self.in_parts: set[torch.nn.Module] = set()
        self._module = module
        self._before_forward, before_backward = told
        self._before_backward = _OnceABackward(before_backward)
        self._writes = writes
        self._uneven = uneven
        self._unit_of: dict[torch.nn.Module, tuple[torch.nn.Module, ...]] = dict.fromkeys(module.modules(), (module,))
        for unit in reversed(units):
            self._unit_of.update({part: unit.modules for each in unit.modules for part in each.modules()})
        self._inside: _OutermostCall | None = None
        self._contexts = contextlib.ExitStack()
        self._started = self._compiled_runs = False
        self._stale = False
        self._left: dict[torch.nn.Module, list[int | None]] = {}
        self._left_by_forward = False
        self._assigned = AssignedData(module)
        self._placed = ReplacementCheck(module)
        self._output: Any = None
        for first, *_ in set(self._unit_of.values()):
            setattr(first, PASS_ON, self._give_output)
            register_fsdp_forward_method(first, PASS_ON)
        module.register_forward_hook(torch.compiler.disable(self._announce_unwatched))
        for part in (each for unit in units for each in unit.modules):
            part.register_forward_hook(self._watch_unit)
            part.register_forward_pre_hook(self._read_anew, prepend=True)
        for part in module.modules():
            # A list of parameters is never called itself: whoever reads it holds them.
            lists = (each for each in part.children() if isinstance(each, nn.ParameterList | nn.ParameterDict))
            holds = any(next(each.parameters(recurse=False), None) is not None for each in (part, *lists))
            holds = holds or self._reads_one_unit(part)
            if isinstance(part, FSDPModule) or (holds and not isinstance(part, ParametrizationList)):
                part.register_forward_pre_hook(self._enter, prepend=True)

    def _reads_one_unit(self, part: torch.nn.Module) -> bool:
        """Return whether all parameters inside a part, which it may read itself, are gathered with it."""
        units = {self._unit_of[each] for each in part.modules()}
        return len(units) == 1 and next(part.parameters(), None) is not None

    @property
    def running(self) -> bool:
        """Whether a forward or a backward runs just now."""
        return self._inside is not None or in_backward()

    def _read_anew(self, part: torch.nn.Module, args: Any) -> None:
        """Have a unit compiled with what is around it read its shards, where torch's own hook ends the graph."""
        del args
        if torch.compiler.is_compiling() and getattr(part, COMPILED_CALL) is None:
            torch.compiler.disable(self._assigned.take_in_called)(part)

    def _watch_unit(self, part: torch.nn.Module, args: Any, output: Any) -> None:
        """Watch what a unit returns: gradients may be computed inside the forward around it, too."""
        del part, args
        self.second_derivatives.watch(output)

    def _announce_unwatched(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        """Announce a backward through what was compiled, inside of which no call is watched from its begin."""
        del args
        self._compiled_runs = False
        if self._inside is None and not in_backward():
            self._announce_backward(Shown.of(output))
            self._note_left(module)

    def send_left(self) -> None:
        """Send gradients that a backward has left with units, having come past what they returned."""
        start = torch.zeros((), requires_grad=True)
        passed = [self._pass_on(first, start * 1) for first in {unit[0]: None for unit in self._unit_of.values()}]
        torch.stack(passed).sum().backward()

    def gather_anew(self) -> None:
        """Mark what is gathered as outdated: shards may be changed until the next call, which gathers anew."""
        self._stale = True

    def end_abandoned(self, latest: RunningCall | None = None) -> None:
        """End a call that a ``KeyboardInterrupt`` has ended, before what it has written is lost, or shards change.

        Args:
            latest: A call that begins just now, if one does.
        """
        if self._inside is not None and self._inside.call.is_over(latest):
            leave_alone(self._contexts)
            self._end(self._inside)
            self._end_failed()

    def end_unfinished(self) -> None:
        """End a call that an exception has ended, and nobody was told: nor is of one of a compiled module."""
        self.end_abandoned()
        if self._compiled_runs:
            self._compiled_runs = False
            self._end_failed()

    def _begin_compiled(self) -> None:
        self.end_unfinished()
        self._compiled_runs, self._uneven.compares = True, False
        self._free_stale(self._module)

    def _enter(self, part: torch.nn.Module, args: Any) -> None:
        del args
        if torch.compiler.is_compiling():
            if part is self._module:  # torch's own hook ends the graph here, too
                torch.compiler.disable(self._begin_compiled)()
            return
        if self._inside is not None and part in (self._module, self._inside.part):
            self.end_abandoned(RunningCall())
        # Activation checkpointing calls again in backward what has run before.
        if in_backward():
            return
        if self._inside is not None:
            self._compare(self._uneven.enter, part)
            self._assigned.take_in_called(part)
            return
        # What the compiler leaves to Python stands inside what it runs, and may be left so on some ranks alone.
        if self._compiled_runs and part is not self._module and is_being_called(self._module):
            return
        self._compare(self._uneven.begin, part)
        self._before_forward()
        stale = self._free_stale(part)
        leave = part.register_forward_hook(self._leave, always_call=True)
        self._inside = _OutermostCall(part, leave, RunningCall())
        if part is self._module:
            self._started = True
            return
        # What is gathered in inference mode could never be trained with.
        self._contexts = without_inference_mode()
        if not self._started:
            # Torch takes the first module that runs for the outermost.
            self._pass_on(self._module, None)
            self._started = True
        if stale:  # a method goes on with what the root had gathered
            cast("FSDPModule", self._module).unshard()
        unit = self._unit_of[part][0]
        if self._unit_of[part] != (part,):
            self.in_parts.add(unit)
        cast("FSDPModule", unit).unshard()
        self._writes.begin(unit, part)

    def _compare(self, compare: Callable[[torch.nn.Module], None], part: torch.nn.Module) -> None:
        """Compare what ranks call; where they differ, some have begun with what was gathered ahead, and others not."""
        try:
            compare(part)
        except SetupError:
            drop_coming(self._module)
            raise

    def _note_left(self, part: torch.nn.Module) -> None:
        """Note what a call leaves gathered: its own unit at most and the root's, unless it is the whole forward."""
        self._left_by_forward = part is self._module
        units = [self._module, self._unit_of[part][0]]
        if self._left_by_forward:
            units = cast("list[torch.nn.Module]", sharded_parts(part))
        self._left.update({each: shard_versions(each) for each in units if is_gathered(each)})

    def _free_stale(self, part: torch.nn.Module) -> bool:
        """Free what is gathered if shards may have changed since; return whether that was so."""
        self._placed.check(self._stand_ins)
        left, self._left = self._left, {}
        anew = self._left_by_forward or part is self._module
        changed = any(is_gathered(each) and (anew or shard_versions(each) != left[each]) for each in left)
        stale, self._stale = self._stale or self._assigned.pending or changed, False
        if stale:
            reshard(self._module)
        if self._assigned.pending:
            self._assigned.take_in()
        return stale

    def _stand_ins(self) -> dict[torch.Tensor, torch.Tensor]:
        return {each: shard for part in self._module.modules() for each, shard in gathered_for(part).items()}

    def _leave(self, part: torch.nn.Module, args: Any, output: Any) -> Any:
        del args
        failed = output is None and sys.exc_info()[0] is not None  # as torch calls hooks that it always calls
        try:
            if not failed:
                failed = True  # unless the call ends on all ranks
                self._uneven.agree(part, ends=True)
                failed = False
            unit = self._unit_of[part]
            if part is not self._module and part not in unit:  # else its own hooks do
                self._writes.end(unit[0], part)
            shown = Shown.of(output)
            self.second_derivatives.watch(shown)
            self._announce_backward(shown)
            if part not in unit:
                return output if output is None else self._pass_on(unit[0], shown).output
            # Torch sees by itself that a unit has run, but it waits for all of its modules.
            for other in unit:
                if other is not part:
                    shown = run_unit_hooks(other, shown)
            return shown.output
        finally:
            assert self._inside is not None
            self._end(self._inside)
            if failed:
                self._end_failed()
            elif part is self._module and not torch.is_grad_enabled():
                reshard(part)
            else:
                self._note_left(part)

    def _end(self, outermost: _OutermostCall) -> None:
        outermost.leave.remove()
        self._inside = None
        self._contexts.close()

    def _end_failed(self) -> None:
        """Free what a forward had gathered that an exception has ended: torch would go on with it after a step."""
        self._writes.take()
        drop_coming(self._module)
        if not any(map(deferred_shards, sharded_parts(self._module))):  # else a backward comes before any step
            begin_anew(self._module)

    def _announce_backward(self, output: Any) -> None:
        """Call ``before_backward`` once a backward comes to an output, but none that lives on, such as a parameter."""
        for each in tree_leaves(output):
            if isinstance(each, torch.Tensor) and each.grad_fn is not None:
                each.register_hook(self._before_backward)

    def _pass_on(self, unit: torch.nn.Module, output: Any) -> Any:
        self._output = output
        try:
            # Torch moves what a root is given to CUDA devices, and stumbles over a call that gives nothing.
            return getattr(unit, PASS_ON)(None)
        finally:
            self._output = None

    def _give_output(self, placeholder: None) -> Any:
        del placeholder
        return self._output


@dataclasses.dataclass(frozen=True)
class _OutermostCall:
    """The call around all others of a module that run just now.

    Attributes:
        part: What is called.
        leave: The hook that ends it.
        call: Tells whether it runs still.
    """

    part: torch.nn.Module
    leave: RemovableHandle
    call: RunningCall


class _OnceABackward:
    """Calls a function when a backward comes to the first of several tensors, as a hook of each."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._last: int | None = None

    def __call__(self, gradient: torch.Tensor) -> None:
        """Call it, unless this backward has come to one of the others."""
        del gradient
        if self._last != running_backward():
            self._last = running_backward()
            self._function()
