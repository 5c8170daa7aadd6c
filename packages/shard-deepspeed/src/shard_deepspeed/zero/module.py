"""One module under ZeRO: its engine, and the part of each trained parameter that this rank steps."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shard_core import SetupError
from shard_core.backend import (
    LocalGradient,
    NoInferenceMode,
    ReplacementCheck,
    RunningCall,
    follow_references,
    inside_objects,
)
from shard_deepspeed import _versions
from shard_deepspeed.zero.late_state import late_state
from shard_deepspeed.zero.manual_writes import ManualWrites, PartitionedParameter
from shard_deepspeed.zero.named_parameters import gather_listed, list_plainly
from shard_deepspeed.zero.optimizer_state import adopt, cut_state, slice_state
from shard_deepspeed.zero.partitions import partitions, shard_part
from shard_deepspeed.zero.stepped_values import SteppedValues, check_open
from shard_deepspeed.zero.trained_parameter import TrainedParameter, fill_frozen
from shard_deepspeed.zero.whole_loads import WholeLoads

if TYPE_CHECKING:
    from shard_core.backend import Collectives, FlatPart, ParameterNames
    from shard_deepspeed.zero.uneven_calls import UnevenCalls


class ZeroModule:
    """A module whose trained parameters DeepSpeed shards; optimizers step the parts on this rank.

    An optimizer's groups hold parts instead of parameters, so that groups, state and gradients stay torch's own:
    a gradient is there if a backward has reached the parameter, and gone when it is thrown away.

    Args:
        module: The user's.
        engine: DeepSpeed's, over all trained parameters of the module.
        rank: This rank.
        norm: Computes the norm of a gradient over all ranks, given its parameter's name before it, or refuses to.
        uneven: Compares what ranks come to.
        collectives: Of all ranks.

    Attributes:
        engine: DeepSpeed's.
        deferring: Whether backwards keep gradients on this rank just now.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        engine: Any,
        rank: int,
        *,
        norm: Callable[..., torch.Tensor],
        uneven: UnevenCalls,
        collectives: Collectives,
    ) -> None:
        self.engine = engine
        self.deferring = False
        self._uneven, self._collectives = uneven, collectives
        self._module = module
        self._layout = partitions(engine, rank)
        self._trained: dict[int, TrainedParameter] = {}
        self._parts: dict[int, FlatPart] = {}
        held = []
        for name, parameter in module.named_parameters():
            stored = _versions.stored_shard(parameter)
            if is_trained(parameter):
                part = self._layout.part(parameter)
                self._trained[id(parameter)] = TrainedParameter(
                    name=name, parameter=parameter, part=part, norm=functools.partial(norm, name)
                )
            elif stored is not None and stored.numel():  # without elements it is whole on every rank
                part = shard_part(parameter, stored, rank)
            else:
                continue
            self._parts[id(parameter)] = part
            held.append(PartitionedParameter(name=name, parameter=parameter, part=part))
        self._writes = ManualWrites(self._layout, held, collectives)
        self._placed = ReplacementCheck(module, _versions.full_shape if self._layout.lets_go else None)
        self._call: RunningCall | None = None
        self._stepped = {id(each.part.values) for each in self._trained.values()}
        self._hooks: list[Any] = [
            each.parameter.register_post_accumulate_grad_hook(each.note) for each in self._trained.values()
        ]
        self._uneven.watch_calls()
        for submodule in module.modules():  # methods of the module are called past its own hooks
            publish = functools.partial(self._publish_for, list(submodule.parameters(recurse=False)))
            self._hooks.append(submodule.register_forward_pre_hook(publish, prepend=True))
        if self._layout.lets_go:
            self._hooks.append(WholeLoads(module, self._parts, self._writes.take, self._writes.record))
            self._hooks.append(module.register_forward_hook(self._end_forward, always_call=True))
            gather_listed(module, self._end_abandoned)
            self._hooks += [hook for part in module.modules() for hook in self._writes.watch(part)]
        self._hooks.append(module.register_state_dict_pre_hook(self._writes.check_shown))
        # Before DeepSpeed's own, which gathers parameters of the module itself over what was written to them.
        self._hooks.append(module.register_forward_pre_hook(self._begin_forward, prepend=True))
        self._hooks.append(NoInferenceMode(module))

    def steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps parts of this module."""
        return any(id(tensor) in self._stepped for group in optimizer.param_groups for tensor in group["params"])

    def part_of(self, parameter: torch.Tensor) -> FlatPart | None:
        """Return what of a parameter this rank holds; None for what is whole on every rank."""
        part = self._parts.get(id(parameter))
        return None if part is None or part.values is parameter else part

    def parts(self) -> dict[torch.Tensor, FlatPart]:
        """Return this rank's parts by parameter, with what was written into the module's parameters."""
        self.copy_writes()
        found = ((parameter, self.part_of(parameter)) for parameter in self._module.parameters())
        return {parameter: part for parameter, part in found if part is not None}

    def repoint(self, optimizer: torch.optim.Optimizer, names: ParameterNames) -> None:
        """Point an optimizer at parts instead of parameters; its groups stay the same dictionaries.

        Args:
            optimizer: Over the module's parameters.
            names: The names they had before setup.

        Raises:
            SetupError: If it has made state of parameters whose values were away, and cannot be made again.
        """
        state = late_state(optimizer, {key: each.part.values for key, each in self._trained.items()})
        names.repoint([optimizer], self._module)
        self.adopt(optimizer)
        optimizer.state.update(state)
        parts: dict[torch.Tensor, torch.Tensor] = {each.parameter: each.part.values for each in self._trained.values()}
        follow_references(optimizer, parts, lambda values, kept: self.lay_out(values, "", kept))
        self._hooks.append(optimizer.register_load_state_dict_post_hook(self.adopt))
        optimizer.register_step_pre_hook(check_open)  # for good: it may be stepped after teardown

    def lay_out(self, values: torch.Tensor, slot: str, value: torch.Tensor) -> torch.Tensor:
        """Slice a value of optimizer state to a part of this module; anything else is left alone.

        Args:
            values: The part, or another tensor.
            slot: What the optimizer calls the value.
            value: The whole parameter's.
        """
        part = next((each.part for each in self._trained.values() if each.part.values is values), None)
        sliced: torch.Tensor = value if part is None or values.shape == value.shape else slice_state(slot, value, part)
        return sliced

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace parameters of the module in an optimizer's groups by their parts.

        Args:
            optimizer: One that may have been given more of them, by ``add_param_group``.
        """
        adopt(optimizer, self._trained)

    def cut_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut whole tensors in the state of an optimizer's parts."""
        cut_state(optimizer, self._trained)

    def make_ready(self) -> None:
        """Prepare a backward."""
        self._writes.check_published()
        if self._layout.spreads:
            self._placed.check_dtypes()
        self._check_held()
        self._uneven.begin_backward()
        if self._layout.lets_go or any(self._layout.moved(each.parameter) for each in self._trained.values()):
            self.copy_writes()  # of its forward: what it computes again, or users write next, would be without them
        self.follow_gradients()
        if any(each.left for each in self._trained.values()):
            self.drop_gradients()
            raise SetupError(
                "loss.backward() has left gradients on their rank, which are thrown away; call strategy.backward(loss, "
                "model) instead of loss.backward(), and begin the step anew."
            )
        self._drop_discarded()
        for each in self._trained.values():
            each.check_hooks()
            each.hide_deferred()
            each.passed = each.reached = False
            each.hide_gradient()
        self._layout.make_ready(self._trained.values())

    def _check_held(self) -> None:
        """Check that parameters are those that DeepSpeed has; at stage 3 it goes through all there are."""
        self._placed.check_shapes()
        self._placed.check_held(alone=self._layout.lets_go)

    def _drop_discarded(self) -> None:
        """Throw away gradients that wait in the module where users have thrown away what parts show for them.

        Raises:
            SetupError: If they have changed something, or thrown away some. All is gone then, too, or a later step
                would be taken with it.
        """
        if not any(each.touched for each in self._trained.values()):
            return
        kept = [each for each in self._trained.values() if each.shows_deferred and each.part.values.grad is not None]
        for each in self._trained.values():
            if kept or each.waits:
                each.drop()
        if kept:
            raise SetupError(
                f"gradients were changed, or some of them thrown away, {kept[0].name!r} for one not, while they wait "
                "on their rank for the end of no_backward_sync(), where they stand in the module's parameters and not "
                "in optimizer.param_groups; all of these micro-batches are thrown away: begin them anew, and change "
                "gradients after the last backward, which is outside."
            )

    def drop_gradients(self) -> None:
        """Throw away all gradients, and what DeepSpeed was about to send."""
        for each in self._trained.values():
            each.drop()
        self._layout.forget()

    def graph_kept(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a backward that another one may follow through the same graph."""
        return _versions.backwards_uncounted(self._module)

    def used(self) -> list[tuple[str, bool]]:
        """List what is trained by name, and whether this backward has come to it, or one before that was deferred.

        Gradients go into messages as backward makes them, those that have waited last, so both count; nothing is listed
        where they go in one order on every rank.
        """
        trained = [] if self.deferring or self._layout.sends_last else self._trained.values()
        return [pair for each in trained for pair in ((each.name, each.passed), (each.name, each.waits))]

    def end_backward(self) -> None:
        """End a backward on every rank; who has no gradient that others have has zeros, unless some are sent."""
        self._uneven.end_backward()
        if self.deferring or not self._layout.sends_last or self._collectives.world_size == 1:
            return
        trained = self._trained.values()
        mine = torch.tensor([(each.passed, each.waits) for each in trained], dtype=torch.int64)
        used = self._collectives.all_reduce(mine, reduce_op="max").tolist()
        for each, (passed, waits) in zip(trained, used, strict=True):
            each.passed = bool(passed)
            if waits and not each.waits:
                each.fill()
            elif passed and each.parameter.grad is None:  # what was frozen since the forward of another rank
                fill_frozen(each.parameter)

    @property
    def waits(self) -> bool:
        """Whether gradients of deferred backwards are yet to be averaged."""
        return any(each.waits for each in self._trained.values())

    def finish(self) -> None:
        """Average what a backward has left and add it to the parts' gradients, unless that is deferred."""
        if not self.deferring and any(each.passed for each in self._trained.values()):
            waiting = [each for each in self._trained.values() if each.waits]
            self._layout.reduce(self._trained.values())
            self._layout.collect(waiting)
            for each in waiting:
                each.waits = False
        self._writes.computed = False
        for each in self._trained.values():
            each.reached = False  # from here on by a backward past the strategy
            each.drop_zeros()
            each.show_gradient()
            each.show_deferred()

    def _begin_forward(self, module: torch.nn.Module, args: object) -> None:
        """Check early which gradients are gone, whose denominators go too, and which values are new, before they go."""
        del module, args
        latest = RunningCall()
        self._uneven.begin_call()
        self._end_abandoned(latest)  # before anything reads parameters, which DeepSpeed notes in a forward
        self.follow_gradients()
        self._publish_for(None)
        self._writes.computed = self._writes.computed or torch.is_grad_enabled()
        if self._layout.lets_go:
            self._call = latest
            self._placed.check()
            self._placed.check_held(alone=True, new_parts=torch.is_grad_enabled())
            self.copy_writes()
            _versions.gather_persistent(self.engine.optimizer)

    def _publish_for(self, read: list[torch.Tensor] | None, *_: object) -> None:
        """Bring to the module what was written to parts of what is read; None for all parameters."""
        if (read is None or not torch.compiler.is_compiling()) and self._writes.are_unpublished(read):
            self.copy_writes()
            self.publish()

    def _end_abandoned(self, latest: RunningCall | None = None) -> None:
        """End a forward that a ``KeyboardInterrupt`` has ended, of which torch's hooks do not hear."""
        if not torch.compiler.is_compiling() and self._call is not None and self._call.is_over(latest):
            self._call = None
            _versions.end_failed_forward(self.engine)

    def _end_forward(self, module: torch.nn.Module, args: object, output: Any) -> None:
        """Announce backwards from tensors inside objects, in which DeepSpeed looks for none; end what has failed."""
        del args
        self._call = None
        if output is None and sys.exc_info()[0] is not None:  # as torch calls hooks that it always calls
            _versions.end_failed_forward(self.engine)
            return
        try:
            self._uneven.end_call()
        except SetupError:
            _versions.end_failed_forward(self.engine)
            raise
        for tensor in inside_objects(output):
            _versions.announce_backward(self.engine.optimizer, module, tensor)

    def follow_gradients(self) -> None:
        """Take what stands in the place of gradients, and drop those that the module's parameters show no more."""
        left = any(each.left for each in self._trained.values())
        # All are looked at first: where gradients of parts share memory, a change of one counts for the others.
        for each in [each for each in self._trained.values() if each.replaced]:
            each.take_replacement()
        for each in self._trained.values():
            each.follow_gradient()
        if left and not any(each.left for each in self._trained.values()):
            self._layout.forget()

    def copy_writes(self) -> None:
        """Copy what was written into the module's parameters into the parts."""
        self._end_abandoned()
        self._placed.check_shapes()
        self._writes.take()

    def begin_step(self) -> None:
        """Take in what users may have done to values and gradients by now."""
        self.copy_writes()
        self.follow_gradients()
        self._writes.begin_step()

    def check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer is not stepped without gradients that were made for it.

        Args:
            optimizer: What is about to step.

        Raises:
            SetupError: If gradients of its parameters have not been averaged.
        """
        self._check_held()
        stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        waiting = sum(each.waits and id(each.part.values) in stepped for each in self._trained.values())
        if waiting:
            raise SetupError(
                f"gradients of {waiting} parameters have not been averaged over ranks, and the step would be without "
                "them; call strategy.backward(loss, model) instead of loss.backward(), the last one before a step "
                "outside no_backward_sync."
            )

    def gradients(self, optimizer: torch.optim.Optimizer) -> list[LocalGradient]:
        """Return this rank's parts of the gradients of this module an optimizer will step with."""
        over = (dist.group.WORLD,) if int(self.engine.zero_optimization_stage()) else ()
        return [
            LocalGradient(tensor.grad, over)
            for group in optimizer.param_groups
            for tensor in group["params"]
            if id(tensor) in self._stepped and tensor.grad is not None
        ]

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the parts' values, stepped or loaded, to all ranks."""
        self._layout.publish()
        self._writes.record()

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Keep gradients on this rank."""
        self.engine.set_gradient_accumulation_boundary(False)
        self.deferring = self._uneven.deferring = True
        try:
            yield
        finally:
            self.engine.set_gradient_accumulation_boundary(True)
            self.deferring = self._uneven.deferring = False

    def close(self) -> None:
        """Remove all hooks from the module."""
        for hook in self._hooks:
            hook.remove()
        self._uneven.close()
        for each in self._trained.values():
            each.remove_proxy()
            if isinstance(each.part.values, SteppedValues):
                each.part.values.is_closed = True
        list_plainly(self._module)
        _versions.destroy(self.engine)


def is_trained(parameter: Any) -> bool:
    """Return whether there is anything to train of a parameter, sharded or not."""
    return bool(parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()))
