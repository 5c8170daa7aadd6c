"""Sharding modules over data-parallel ranks with torch's ``fully_shard`` (FSDP2), for every engine that does."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from shard_core._versions import begin_anew, freeze_unsharded, left_gradients
from shard_core.collectives.rank_agreement import check_used_alike
from shard_core.errors import SetupError
from shard_core.forward_calls import NoInferenceMode
from shard_core.fully_shard.deferred_sync import DeferredGradients, DeferredSync, PlainBackward
from shard_core.fully_shard.entry_methods import EntryMethods, reshard
from shard_core.fully_shard.forward_writes import ForwardWrites
from shard_core.fully_shard.gloo_comm import end_backward, is_gloo, use_gloo_comm
from shard_core.fully_shard.gradient_hooks import GradientHooks
from shard_core.fully_shard.named_parameters import list_shards, shard_full_tensors
from shard_core.fully_shard.object_outputs import shard_unit
from shard_core.fully_shard.uneven_calls import UnevenCalls, at_end_of
from shard_core.fully_shard.units import kept_whole, log_units, sharded_parts
from shard_core.gradients import is_differentiable, on_gradient
from shard_core.initialization.materialize import Materializer, refuse_unset
from shard_core.initialization.meta import initialise, needs_values
from shard_core.initialization.recording import Recording, record
from shard_core.parameters import make_contiguous, plain_name
from shard_core.precision.dtypes import dtype_named
from shard_core.replicas import AveragedGradients, send_values

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from shard_core.collectives.interface import Collectives
    from shard_core.fully_shard.units import Unit
    from shard_core.parameters import ParameterNames
    from shard_core.precision.interface import PrecisionPolicy


class FullySharder:
    """Shards modules unit by unit and never holds one of them unsharded.

    A strategy holds one per run. Order of calls: ``recording`` around construction, ``shard``, then
    ``backward`` around each backward, ``deferred`` around those whose gradients need not travel yet, ``reshard`` before
    shards are read or stepped, ``close`` at the end.

    Args:
        mesh: The data-parallel ranks along one axis, or along two: copies, and the ranks that shard each.
        collectives: Of all ranks.
        units: Returns which submodules of a module share one message.
        reshard_after_forward: Whether unsharded parameters are freed between forward and backward; None
            does so for all but the root's.
        mixed_precision: Dtypes that differ from those parameters are stored in; None for no others.
        offload: Where shards live between uses; None for the device.
        deferred: What ``deferred`` defers: all of the reduction, the reduction between copies, or nothing; None
            for the second where there are several copies, else for the first.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        collectives: Collectives,
        *,
        units: Callable[[torch.nn.Module], Sequence[Unit]],
        reshard_after_forward: bool | None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        offload: OffloadPolicy | None = None,
        deferred: Literal["all", "all_reduce", "nothing"] | None = None,
    ) -> None:
        self._mesh = mesh
        self._collectives = collectives
        self._units = units
        self._reshard_after_forward = reshard_after_forward
        self._mixed_precision = mixed_precision or MixedPrecisionPolicy()
        self._offload = offload or OffloadPolicy()
        several = mesh.ndim == 2 and mesh.size(0) > 1
        self._deferred = deferred or ("all_reduce" if several else "all")
        self._replicas: weakref.WeakKeyDictionary[torch.nn.Module, AveragedGradients] = weakref.WeakKeyDictionary()
        self._syncs: weakref.WeakKeyDictionary[torch.nn.Module, DeferredSync] = weakref.WeakKeyDictionary()
        self._gradients: weakref.WeakKeyDictionary[torch.nn.Module, DeferredGradients] = weakref.WeakKeyDictionary()
        self._hooks: weakref.WeakKeyDictionary[torch.nn.Module, GradientHooks] = weakref.WeakKeyDictionary()
        self._uneven: weakref.WeakKeyDictionary[torch.nn.Module, UnevenCalls] = weakref.WeakKeyDictionary()
        self._calls: weakref.WeakKeyDictionary[torch.nn.Module, EntryMethods] = weakref.WeakKeyDictionary()
        self._writes: weakref.WeakKeyDictionary[torch.nn.Module, ForwardWrites] = weakref.WeakKeyDictionary()
        self._deferring: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._in_backward = False
        self._plain = PlainBackward(self._syncs, self._gradients, self._deferring, self._drop_discarded)
        self._recording: Recording | None = None
        self._leaves_parameters = False

    @contextlib.contextmanager
    def recording(self, empty_init: bool) -> Iterator[None]:
        """Record what constructors do instead of doing it; ``shard`` replays it shard by shard.

        Args:
            empty_init: Whether parameters wait for a checkpoint instead.
        """
        with record(self._collectives, after=self._recording) as recording:
            yield
        self._recording = recording
        self._leaves_parameters = empty_init

    def shard(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        names: ParameterNames,
        *,
        policy: PrecisionPolicy,
        device: torch.device,
        lay_out: Callable[[torch.nn.Module], None] | None = None,
        whole: Collection[torch.nn.Parameter] = (),
        param_init_fn: Callable[[torch.nn.Module], object] | None = None,
    ) -> Sequence[Unit]:
        """Shard a module in place and point its optimizers at the shards.

        Args:
            module: The user's module.
            optimizers: Over its parameters as they are.
            names: The names these have.
            policy: Which dtypes recorded tensors get.
            device: Where this rank computes, and keeps its shards unless they are offloaded.
            lay_out: Lays parameters out along other axes before they are sharded; recorded ones are on
                the meta device then.
            whole: Parameters of the module that every rank keeps whole; their gradients are averaged all the same.
            param_init_fn: Initialises what a submodule has on the meta device.

        Returns:
            The units that were formed, without the root's.

        Raises:
            SetupError: If a tensor has no values and nothing that gives it some.
        """
        if needs_values(module, self._collectives):
            initialise(module, param_init_fn, self.recording(empty_init=False))
        make_contiguous(module)
        send_values(module)
        values = Materializer(module, dtype_named(policy.parameter), dtype_named(policy.buffer))
        if lay_out is not None:
            lay_out(module)
        units = self._units(module)
        kept = kept_whole(module, units, {names.of(parameter) for parameter in whole})
        self._shard(module, units, kept)
        values.allocate(
            device, parameters=torch.device("cpu") if isinstance(self._offload, CPUOffloadPolicy) else device
        )
        for parameter in _unsharded(module, kept):
            parameter.data = parameter.data.to(device)
        values.pop_optimizer_state(optimizers)
        names.repoint(optimizers, module)
        values.fill(parameters=not self._leaves_parameters)
        if self._leaves_parameters:
            refuse_unset(module, self._collectives)
        self._replicas[module] = AveragedGradients(_unsharded(module, kept), at_end=True)
        for parameter in filter(is_differentiable, _unsharded(module, kept) if self._mesh.size() > 1 else ()):
            self._handles.append(on_gradient(parameter, self._check_backward))
        shards = {plain_name(name): p for name, p in module.named_parameters() if isinstance(p, DTensor)}
        self._gradients[module] = DeferredGradients(shards)
        self._hooks[module] = GradientHooks(module)
        self._hooks[module].move(names)
        self._writes[module] = ForwardWrites(module, units, self._mesh)
        follow = functools.partial(self._begin_plain_backward, self._hooks[module])
        at_once = self._deferred == "all_reduce"
        self._uneven[module] = UnevenCalls(module, units, self._mesh, self._collectives, at_once=at_once)
        told = (self._begin_forward, follow)
        self._calls[module] = EntryMethods(module, units, told, self._writes[module], self._uneven[module])
        if at_once:
            self._syncs[module] = DeferredSync(module, units, self._collectives, self._calls[module].in_parts)
        list_shards(module, self._calls[module])
        NoInferenceMode(module)
        for part in module.modules():  # any of which may be given its own
            part.register_load_state_dict_pre_hook(functools.partial(shard_full_tensors, weakref.ref(module)))
        return units

    @contextlib.contextmanager
    def deferred(self, module: torch.nn.Module) -> Iterator[None]:
        """Defer sync inside: unsharded gradients add up on this rank, or this copy's shards of them.

        Args:
            module: One that was sharded.
        """
        if self._deferred == "nothing":
            yield
            return
        assert isinstance(module, FSDPModule)
        send = module.set_requires_gradient_sync if self._deferred == "all" else module.set_requires_all_reduce
        holders = [each[module] for each in (self._replicas, self._syncs) if module in each]
        send(False)
        self._deferring.add(module)
        for each in holders:
            each.deferred = True
        try:
            yield
        finally:
            send(True)
            self._deferring.discard(module)
            for each in holders:
                each.deferred = False

    @contextlib.contextmanager
    def backward(self, module: torch.nn.Module, loss: torch.Tensor) -> Iterator[torch.Tensor]:
        """Run a backward inside, after which no gradient is left out that an earlier one had deferred.

        Args:
            module: One that was sharded.
            loss: What it begins at; the backward of what is yielded is run instead.

        Raises:
            SetupError: If a unit ran in an earlier micro-batch and not in this one, or another part of it, if deferred
                gradients were changed, or if ranks have used different parameters.
        """
        self._uneven[module].agree(None)
        self._begin_backward()
        self._in_backward = True
        try:
            with self._explained():
                yield at_end_of(loss, self._fill)
            self._send_left()
        finally:
            self._in_backward = False
        came_through = {module}
        for sharded, gradients in self._gradients.items():
            if sharded in self._deferring:
                gradients.show()
            elif gradients.show_again(sharded):
                came_through.add(sharded)
        self._check_left()
        self._end_second_derivatives()
        for replicas in self._replicas.values():
            replicas.end_backward()
        for sharded, sync in self._syncs.items():
            sync.end_backward(named=sharded in came_through)
        if self._mesh.size() > 1:  # else nothing is sent
            sent = [gradients for sharded, gradients in self._gradients.items() if sharded not in self._deferring]
            check_used_alike([pair for gradients in sent for pair in gradients.used()], self._collectives)

    def _fill(self) -> None:
        end_backward(self._mesh)
        for sharded, uneven in self._uneven.items():
            if sharded not in self._deferring or self._deferred == "all_reduce":
                uneven.fill()
        for sync in self._syncs.values():
            sync.reduce()

    def _begin_forward(self) -> None:
        self._begin_anew()
        self._check_left()  # by a backward past the strategy

    def _begin_backward(self) -> None:
        self._begin_anew()
        for sharded, writes in self._writes.items():
            self._calls[sharded].end_unfinished()
            writes.take()
        self._drop_discarded()
        for sharded in self._gradients:
            for part in sharded_parts(sharded):
                freeze_unsharded(part)
        begun: tuple[DeferredGradients | GradientHooks | DeferredSync, ...]
        begun = (*self._gradients.values(), *self._hooks.values(), *self._syncs.values())
        for each in begun:  # the loss may have come through several modules
            each.begin_backward()
        for calls in self._calls.values():
            calls.second_derivatives.gather()

    def on_gradient(self, parameter: torch.Tensor, called: Callable[[torch.Tensor], object]) -> RemovableHandle:
        """Have a function called with a parameter after each backward that has reached it, deferred ones included."""
        self._plain.tell(parameter, functools.partial(called, parameter))
        return on_gradient(parameter, called)

    def _begin_anew(self) -> None:
        """Begin anew where an exception has ended a backward past the strategy."""
        if self._plain.running is not None:
            self.drop_unfinished()

    def _begin_plain_backward(self, hooks: GradientHooks) -> None:
        if not self._in_backward:  # which has begun with them
            self._plain.begin()
            hooks.begin_backward()

    def _check_backward(self, parameter: torch.Tensor) -> None:
        """Refuse a gradient of what is whole on every rank where nothing would average it."""
        if not self._in_backward:
            raise SetupError(
                f"loss.backward() would leave the gradient of a parameter of shape {tuple(parameter.shape)}, which is "
                "not sharded, on its rank, and replicas would drift apart; call strategy.backward(loss, model), which "
                "averages it."
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate torch's error of a unit's deferred gradients whose row is not as long as the one before."""
        try:
            yield
        except RuntimeError as error:
            if "size of tensor" in str(error):
                for sync in self._syncs.values():
                    sync.end_backward(named=False)
            raise

    def drop_unfinished(self) -> None:
        """Throw away all gradients, and what a backward that an exception has ended was about to send."""
        self._plain.running = None
        for sharded, gradients in self._gradients.items():
            gradients.drop_all(sharded)
            begin_anew(sharded)
            self._calls[sharded].second_derivatives.end(deferred=True)
            self._replicas[sharded].drop()
            if sharded in self._syncs:
                self._syncs[sharded].forget()

    def _send_left(self) -> None:
        """Send gradients to which a loss came through the graph of others, past what units have returned."""
        for sharded, calls in self._calls.items():
            if calls.second_derivatives.pending and sharded not in self._deferring:
                calls.send_left()

    def _check_left(self) -> None:
        """Check that no unit has kept gradients since nothing told it of the backward's end."""
        for sharded, gradients in self._gradients.items():
            if sharded not in self._deferring and not gradients.wait and left_gradients(sharded_parts(sharded)):
                self.drop_unfinished()
                raise SetupError(
                    f"the loss came through {type(sharded).__name__.removeprefix('FSDP')}, but not through what its "
                    "forward has returned, so its gradients were left on their rank, and are thrown away; return what "
                    "the loss is computed from: a tensor, a tuple, a dict, a dataclass or an object with tensors for "
                    "attributes."
                )

    def close(self) -> None:
        """Release modules, which what is kept for each of them holds, and gradients that nobody averages now."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        kept = (self._replicas, self._syncs, self._gradients, self._hooks, self._uneven, self._calls, self._writes)
        for each in kept:
            each.clear()
        self._recording = None

    def check_sent(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that no gradient still waits of what an optimizer steps, the last backward having come past it.

        Args:
            optimizer: One over shards.

        Raises:
            SetupError: If one does, or if an exception has ended a backward past the strategy.
        """
        self._plain.check_ended()
        self._check_left()
        self._drop_discarded()
        waiting = [gradients for gradients in self._gradients.values() if gradients.wait]
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]} if waiting else set()
        for gradients in waiting:
            gradients.check_sent(held)

    def reshard(self) -> None:
        """Free unsharded parameters of all modules, whose shards are about to be read or changed."""
        self._end_second_derivatives()
        for module in self._replicas:
            self._calls[module].end_unfinished()
            reshard(module)

    def _end_second_derivatives(self) -> None:
        for sharded, calls in self._calls.items():
            calls.second_derivatives.end(deferred=sharded in self._deferring)

    def _drop_discarded(self) -> None:
        """Throw away deferred gradients where users have thrown away what is shown for them."""
        for module, gradients in self._gradients.items():
            if gradients.touched and not gradients.forget_sent(module):
                if module in self._syncs:
                    self._syncs[module].forget()
                gradients.drop(module)

    def _shard(self, module: torch.nn.Module, units: Sequence[Unit], kept: Collection[str]) -> None:
        shard = functools.partial(
            shard_unit,
            mesh=self._mesh,
            reshard_after_forward=self._reshard_after_forward,
            mp_policy=self._mixed_precision,
            offload_policy=self._offload,
            ignored_params=set(_unsharded(module, kept)),
        )
        for modules in (*(unit.modules for unit in units), (module,)):
            shard(modules)
        for part in sharded_parts(module) if is_gloo(self._mesh) else ():
            use_gloo_comm(part, self._mesh)
        log_units(module, units, self._mesh)


def _unsharded(module: torch.nn.Module, kept: Collection[str]) -> list[torch.nn.Parameter]:
    """List the parameters that are not sharded: those asked for, and those without a dimension or element to shard."""
    return [p for name, p in module.named_parameters() if p.dim() == 0 or p.numel() == 0 or plain_name(name) in kept]
