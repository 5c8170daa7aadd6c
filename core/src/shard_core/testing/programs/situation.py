"""What is pending in a program, by which its next operation is legal in plain PyTorch or not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shard_core import plugins
from shard_core.capability import Capability
from shard_core.precision.policies import POLICIES
from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.parts import COMPLEX, FROZEN, SLOPE_ONCE, WRITING
from shard_core.testing.programs.settings import ALL_AT_ONCE, EXACT, REAL_ALONE, WHOLE, is_made_before, runs_alone
from shard_core.testing.programs.vocabulary import PREMATURE, ZEROING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.testing.programs.operations import Operation
    from shard_core.testing.programs.program import Program

MEANS = ("contrastive", "penalty", "slopes", "by hand", "slopes by hand", "squares")
"""Backwards of losses that are no sums over rows."""

_FINISHING = (ops.Step, ops.ClipNorm, ops.ClipValue, ops.EditGradients, ops.ShowGradients)
"""What ends a step, and is refused where a backward past the strategy was ended by an exception."""

_LEAVING = ("method", "failed", "failed evaluation", "interrupted", "interrupted by hand")
"""Forwards that may leave weights gathered to the next call, or to the next time that parameters are listed."""


@dataclasses.dataclass
class _Module:
    """What is pending for one module."""

    deferred: bool = False
    waits: bool = False  # what is deferred was not zeroed since
    denominator: bool | None = None
    clipped: bool = False
    stale: bool = False
    infinite: bool = False


class _Files:
    """What was saved, and what of it can be loaded."""

    def __init__(self) -> None:
        self._saved: frozenset[int] | None = None
        self._newest = False
        self._pretrained: set[int] = set()
        self._shows_all = True  # else a module may show later what was written through groups

    def have(self, operation: Operation, module: int, added: frozenset[int]) -> bool:
        """Check that there is what an operation loads or saves; optimizers need to have the groups that were saved."""
        match operation:
            case ops.Load(how=how):
                if how == "modules":
                    return self._saved is not None
                return self._saved == added and (self._newest or how == "path")
            case ops.Fail(how="load" | "object"):
                return self._saved is not None
            case ops.LoadWeights():
                return module in self._pretrained
            case ops.SavePretrained():
                return self._shows_all
            case _:
                return True

    def follow(self, operation: Operation, module: int, added: frozenset[int]) -> None:
        """Go on to after an operation."""
        match operation:
            case ops.Save():
                self._saved, self._newest = added, True
            case ops.SavePretrained():
                self._pretrained.add(module)
            case ops.EditWeights(how="groups" | "groups' data"):
                self._shows_all = False
            case ops.Switch(world_size=size):
                self._newest = False
                self._saved = None if size else self._saved  # other processes have no handle of it
            case _:
                pass


class Situation:
    """Follows a program and says what may come next.

    Args:
        program: Its models and optimizers; operations are told one by one.

    Attributes:
        world_size: How many ranks there are.
        strategy: The strategy's name.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.world_size = program.world_size
        self.strategy = program.strategy
        self._scaled = POLICIES[program.precision].scaled
        self._added: frozenset[int] = frozenset()
        self._files = _Files()
        self._recomputes = _has(program, "activation_checkpointing")
        self._away = _has(program, "param_persistence_threshold")
        self._ignores = _has(program, "ignored")
        self._modules = [_Module() for _ in program.models]
        if program.warmed:
            self._modules[0].denominator = True
        self._unfinished = False  # an exception has ended a backward past the strategy
        self._called: frozenset[int] = frozenset()

    def allows(self, operation: Operation) -> bool:
        """Check whether plain PyTorch, with what the contract adds to it, allows an operation now."""
        operation = operation.refused if isinstance(operation, ops.Attempt) else operation
        number = self._module_of(operation)
        module = self._modules[number]
        alone = self._is_alone(number)
        match operation:
            case ops.Backward():
                allowed = self._adds_up(operation)
            case ops.ClipNorm(finite=finite, fails=fails) if finite or fails:
                allowed = finite and not module.deferred and module.infinite == fails
            case ops.Step():
                allowed = not (module.deferred or module.infinite)
            case ops.EditGradients(how="infinite"):
                # A gradient scaler would skip the step, unless it had looked before; a part left out keeps them.
                allowed = alone and not (module.deferred or self._scaled or self._lacks_of(number))
            case ops.ClipNorm() | ops.ClipValue() | ops.EditGradients() | ops.ShowGradients():
                allowed = not module.deferred and self._has_norm(operation, module)
            case ops.Closure(rows=rows):
                pending = module.deferred or module.infinite
                allowed = alone and not (pending or self._scaled) and len(rows) == self.world_size
            case ops.ZeroGrad() | ops.ZeroByHand():
                allowed = self._may_be_zeroed(operation, number)
            case ops.Forward(how="interrupted" | "interrupted by hand"):
                allowed = not module.denominator  # its backward has none
            case ops.Freeze() | ops.HookGradients() | ops.StepScheduler() | ops.AddGroup() | ops.Fail():
                allowed = self._is_there(operation, number)
            case ops.UpdateAverage() | ops.ShowAverage():
                allowed = self._program.averaged
            case ops.Switch(strategy=strategy, world_size=size, same=same, resumed=resumed):
                allowed = size != self.world_size and not (same and (size or strategy != self.strategy))
                allowed = allowed and not (same and is_made_before(self._program))  # it was given parts of another
                allowed = allowed and not (resumed and not self._files.have(ops.Load(), number, self._added))
            case _:
                allowed = self._files.have(operation, number, self._added)
        premature = isinstance(operation, ops.Fail) and operation.how in (*PREMATURE.values(), "steps")
        finishes = premature or isinstance(operation, _FINISHING)
        allowed = allowed and self._has_kernels(operation, number) and self._takes_complex(operation, number)
        return allowed and not (finishes and self._unfinished)

    def optimizer_of(self, operation: Operation) -> int | None:
        """Return the optimizer that an operation is about, or one of its module, if there is one."""
        module, which = self._module_of(operation), getattr(operation, "optimizer", None)
        stepping = (number for number, spec in enumerate(self._program.optimizers) if spec.module == module)
        return next(stepping, None) if which is None else int(which)

    def _is_there(self, operation: Operation, number: int) -> bool:
        """Check that there is what an operation is about."""
        match operation:
            case ops.Freeze(part=part) | ops.HookGradients(part=part):
                return part in self._program.models[number].parts
            case ops.StepScheduler(optimizer=which):
                return self._program.optimizers[which].scheduled
            case ops.AddGroup(optimizer=which):
                return self._lacks(which)
            case ops.Fail():
                return self._fails(operation, number)
            case _:
                return True

    def _fails(self, operation: ops.Fail, number: int) -> bool:
        """Check that there is what would fail, and that it does."""
        if operation.how in PREMATURE.values():
            return self._modules[number].waits
        if operation.how == "layer":
            card = plugins.find(self.strategy)
            refused = Capability.ENTRY_METHODS not in card.capabilities and "cpu" in card.devices
            return refused and not self._program.compiled
        if operation.how == "steps":  # how many cannot be said beforehand, and a scaler counts them
            return not (self._scaled or self._modules[number].deferred) and self._is_zeroed_by(operation.optimizer)
        return self._files.have(operation, number, self._added)

    def _has_norm(self, operation: Operation, module: _Module) -> bool:
        """Check that gradients are not yet to be divided or unscaled, where torch's own function clips them."""
        by_torch = isinstance(operation, ops.EditGradients) and operation.how == "clipped"
        return not (by_torch and (module.infinite or module.denominator or self._scaled))

    def _may_be_zeroed(self, operation: ops.ZeroGrad | ops.ZeroByHand, number: int) -> bool:
        """Check whether gradients may be zeroed now in one way."""
        module, none = self._modules[number], operation.set_to_none
        if isinstance(operation, ops.ZeroGrad):
            all_of_it = operation.of_module or (self._is_alone(number) and not self._lacks_of(number))
            return (none and all_of_it) or not module.deferred
        # What is zero need not have been zeroed, so that nothing can follow it.
        pending = bool(module.denominator) or module.clipped or (self._scaled and not module.stale)
        return none or not (module.deferred or pending)

    def _is_zeroed_by(self, which: int) -> bool:
        """Check that an optimizer alone steps all of its module, so that it zeroes all gradients there are."""
        number = self._program.optimizers[which].module
        return self._is_alone(number) and not self._lacks_of(number)

    def _has_kernels(self, operation: Operation, number: int) -> bool:
        """Check whether torch computes an operation where models are compiled, steps are fused or gradients sparse."""
        match operation:
            case ops.ClipNorm() | ops.ClipValue() | ops.EditGradients(how="infinite" | "data" | "groups' data"):
                known = "sparse" not in self._program.models[number].parts
            case ops.EditGradients(how="clipped" | "foreach"):
                known = {"sparse", "empty"}.isdisjoint(self._program.models[number].parts) and not self._ignores
            case ops.Backward(how="retain_graph"):
                known = not self._program.compiled
            case ops.Backward(how="penalty" | "slopes" | "slopes by hand" | "squares" as how):
                slope = (SLOPE_ONCE, not self._program.compiled)
                lacking, graphs = (("sparse",), True) if how == "squares" else slope
                known = graphs and set(lacking).isdisjoint(self._program.models[number].parts)
                known = known and self._program.precision in EXACT
            case ops.Backward(how="by hand") | ops.Forward(how="interrupted by hand"):
                known = not self._scaled and not (self._program.compiled and isinstance(operation, ops.Forward))
            case ops.Backward(how="two_forwards" | "crossed" | "contrastive"):
                known = set(WRITING).isdisjoint(self._program.models[number].parts)
            case ops.Initialize(restarts=restarts, forgets=forgets):
                laid_out = "transposed" not in self._program.models[number].parts
                known = laid_out and self._program.precision != "bf16-true" and not (restarts and self._is_odd(number))
                known = known and not (forgets and self._wants_all_momentum(number))
            case ops.Freeze() | ops.Backward(how="frozen" | "layers"):
                recomputed = self._recomputes and getattr(operation, "how", "") == "frozen"
                known = not (recomputed or self._wants_all_momentum(number))
            case ops.Load(how=how):
                waiting = how == "modules" or any(each.denominator is not None for each in self._modules)
                known = not (self._scaled and waiting)
            case ops.EditWeights(how=how):
                known = self._counts_change(how, number)
            case ops.LoadStateDict():
                known = self._program.compiled != "before"
            case _:
                known = True
        return known

    def _wants_all_momentum(self, number: int) -> bool:
        """Check whether a fused kernel steps a module's parameters, all of which have to have momentum, or none."""
        mine = (spec for spec in self._program.optimizers if spec.module == number)
        return any(spec.fused and spec.kind in ALL_AT_ONCE for spec in mine)

    def _counts_change(self, how: str, number: int) -> bool:
        """Check whether engines can see weights change in some way."""
        parts = self._program.models[number].parts
        if number in self._called:
            written = not set(WRITING).isdisjoint(parts)
            listed = how in ("in place", "data") and not (written and self._program.compiled)
            if not (listed or (how == "groups" and not written)):
                return False
        return not self._away or how == "in place" or (how != "data" and set(FROZEN).isdisjoint(parts))

    def _is_odd(self, number: int) -> bool:
        """Check whether optimizers have state of other shapes than a module's parameters, or these are away."""
        return self._away or any(spec.kind in WHOLE for spec in self._program.optimizers if spec.module == number)

    def _takes_complex(self, operation: Operation, number: int) -> bool:
        """Check whether torch computes an operation with complex parameters beside real ones, where there are some."""
        match operation:
            case ops.Switch(strategy=name):
                number, real_alone = 0, name.startswith(REAL_ALONE)  # complex ones are in the first module
            case ops.EditGradients(how=how):
                real_alone = how in ("clipped", "foreach", "infinite")  # infinite times complex is no number
            case ops.Backward(how=how):
                real_alone = how == "squares"
            case _:
                real_alone = isinstance(operation, ops.ClipValue)
        return not real_alone or set(COMPLEX).isdisjoint(self._program.models[number].parts)

    def _adds_up(self, operation: ops.Backward) -> bool:
        """Check that a backward's losses add up to what is pending in all modules that it comes through."""
        if (operation.alone and not runs_alone(self._program, operation.how)) or operation.unused > operation.alone:
            return False
        reached = _reached(operation)
        if max(reached) >= len(self._modules) or len(operation.rows) != self.world_size:
            return False
        zeroed = operation.how in ZEROING
        by_optimizer = operation.how == "zeroed"
        if by_optimizer and (self._lacks_of(operation.module) or not self._is_alone(operation.module)):
            return False
        pending = [_Module() if zeroed else self._modules[each] for each in reached]
        final = any(each.stale or each.clipped for each in pending)
        if final and (self._scaled or operation.denominator):
            return False
        rounds = operation.how in ("contrastive", "layers") and self._program.precision not in EXACT
        uneven = operation.how == "contrastive" and len(set(operation.rows)) > 1
        if rounds or uneven or (operation.how == "layers" and self._program.compiled):
            return False
        if not operation.denominator:
            possible = 0 not in operation.rows
        else:
            stepped = {spec.module for spec in self._program.optimizers}
            lacks = any(self._lacks_of(each) or each not in stepped for each in reached)
            possible = operation.how not in ("gradient", *MEANS) and not lacks
        return possible and all(each.denominator in (None, operation.denominator) for each in pending)

    def _is_alone(self, number: int) -> bool:
        """Check whether a module has one optimizer."""
        return [spec.module for spec in self._program.optimizers].count(number) == 1

    def _lacks_of(self, number: int) -> bool:
        return any(self._lacks(which) for which, spec in enumerate(self._program.optimizers) if spec.module == number)

    def _lacks(self, which: int) -> bool:
        """Check whether an optimizer is still without the part that it was made without."""
        return bool(self._program.optimizers[which].without) and which not in self._added

    def _module_of(self, operation: Operation) -> int:
        """Return the number of the module that an operation is about."""
        if isinstance(operation, ops.ZeroGrad) and operation.of_module:
            return operation.which
        operation = operation.refused if isinstance(operation, ops.Attempt) else operation
        which = operation.which if isinstance(operation, ops.ZeroGrad) else getattr(operation, "optimizer", None)
        return int(getattr(operation, "module", 0)) if which is None else self._program.optimizers[which].module

    def follow(self, operation: Operation) -> None:
        """Go on to after an operation that is allowed."""
        number = self._module_of(operation)
        module = self._modules[number]
        self._files.follow(operation, number, self._added)
        self._unfinished = _is_unfinished(operation, before=self._unfinished)
        _end_waits(self._modules, operation)
        self._called = _called(operation, number, before=self._called)
        if isinstance(operation, ops.Switch):
            self.strategy, self.world_size = operation.strategy, operation.world_size or self.world_size
        match operation:
            case ops.Backward(denominator=denominator, deferred=deferred):
                for each in _reached(operation):
                    begun = _Module() if operation.how in ZEROING else self._modules[each]
                    waits = deferred and each == operation.module  # each for its own context
                    begun = dataclasses.replace(begun, deferred=waits, waits=waits)
                    self._modules[each] = dataclasses.replace(begun, denominator=denominator)
            case ops.ClipNorm() | ops.ClipValue() | ops.EditGradients(how="infinite" | "clipped"):
                infinite = operation.how == "infinite" if isinstance(operation, ops.EditGradients) else False
                module.infinite, module.clipped = module.infinite or infinite, module.clipped or not infinite
            case ops.Step() | ops.Closure():
                module.stale = True
                if self._is_alone(number):
                    module.denominator, module.clipped = None, False
            case ops.ZeroGrad() | ops.Fail(how="steps"):
                if getattr(operation, "of_module", False) or self._is_alone(number):
                    self._modules[number] = _Module(deferred=module.deferred, stale=isinstance(operation, ops.Fail))
            case ops.ZeroByHand(set_to_none=none):
                pending = None if none else module.denominator
                self._modules[number] = _Module(deferred=module.deferred, denominator=pending)
            case ops.AddGroup(optimizer=which):
                self._added |= {which}
                module.stale = True
            case ops.Switch() | ops.Attempt() | ops.Forward(how="interrupted" | "interrupted by hand"):
                throws_all = isinstance(operation, ops.Switch) or getattr(operation, "how", "") == "interrupted"
                self._modules = [_Module(deferred=each.deferred and not throws_all) for each in self._modules]
            case _:
                pass


def _has(program: Program, option: str) -> bool:
    """Check whether a program gives an option, or one whose name begins with it."""
    return any(each.startswith(option) for each in program.options)


def _end_waits(modules: Sequence[_Module], operation: Operation) -> None:
    """Note that what waits may be averaged once another backward has come, whose module may be another one."""
    for module in modules:
        module.waits = module.waits and not isinstance(operation, ops.Backward | ops.Closure)


def _is_unfinished(operation: Operation, *, before: bool) -> bool:
    """Check whether, after an operation, the last backward is one that an exception has ended past the strategy."""
    if isinstance(operation, ops.Backward | ops.Closure | ops.Switch):
        return False
    return before or isinstance(operation, ops.Attempt) or getattr(operation, "how", "") == "interrupted by hand"


def _called(operation: Operation, number: int, *, before: frozenset[int]) -> frozenset[int]:
    """Find of which modules, after an operation, a method ran or a forward stopped, and no backward came since."""
    if isinstance(operation, ops.Backward):
        return before - set(_reached(operation))
    return before | {number} if isinstance(operation, ops.Forward) and operation.how in _LEAVING else before


def _reached(operation: ops.Backward) -> list[int]:
    """List the modules that a loss comes through."""
    return {"through": [0, 1], "detached": [1]}.get(operation.how, [operation.module])
