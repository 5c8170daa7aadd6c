"""Modules under torch's DistributedDataParallel, with gradients that are averaged whatever a loss came through."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shard_core._versions import in_backward
from shard_core.data_parallel.accumulation_nodes import AccumulationNodes
from shard_core.data_parallel.bucket_views import BucketViews
from shard_core.data_parallel.buffers import BufferExchange, send_buffers, sends_no_buffers
from shard_core.data_parallel.unsynced import Unsynced, forward_of
from shard_core.errors import SetupError
from shard_core.forward_calls import ForwardContexts
from shard_core.gradients import graph_nodes, is_differentiable, on_gradient, sparse_parameters
from shard_core.parameters import alone_trained, plain_name
from shard_core.replicas import average_gradients, send_values
from shard_core.structures import is_nested

if TYPE_CHECKING:
    from torch.autograd.graph import Node

_SMALLEST_COMPILED = 2**20


class DDPModules:
    """The modules of one strategy under ``DistributedDataParallel``, and the backwards through them.

    Torch's wrapper gets ready in a forward to average one backward, through which every parameter must be reached.
    Here it gets ready at the beginning of each backward that it can average, and what it cannot is averaged after
    the backward: gradients of a loss that came from methods other than forward, of parameters that were frozen at
    setup, and of all, as long as one that was to be trained then is frozen, or once the dtype of one has changed.

    Made on the rank it serves, one for each strategy; its members are for those of an engine that have their names.

    Args:
        device: Where the modules are.
        broadcast_buffers: Whether rank 0's buffers are sent to all ranks before each forward.
        arguments: Further keywords of ``DistributedDataParallel``, such as ``bucket_cap_mb``.
    """

    def __init__(self, device: torch.device, *, broadcast_buffers: bool = True, **arguments: Any) -> None:
        self._device = device
        self._broadcast_buffers = broadcast_buffers
        self._arguments = arguments
        self._replicas: weakref.WeakKeyDictionary[nn.Module, _Replica] = weakref.WeakKeyDictionary()

    def wrap(self, module: nn.Module) -> nn.Module:
        """Wrap a module, and send rank 0's values to all ranks.

        Args:
            module: On its device, with the same parameters on every rank.

        Returns:
            The ``DistributedDataParallel`` around it; the module itself if nothing in it is to be trained yet.
        """
        # Torch's wrapper divides gradients twice that come after a sparse one, unless the graph is static. What is
        # frozen here it leaves out, and backward averages that, too.
        sparse = set(sparse_parameters(module).values())
        sent = {parameter for parameter in module.parameters() if parameter.requires_grad and parameter not in sparse}
        with alone_trained(sent, filter(is_differentiable, module.parameters())):
            return self._wrap(module)

    def _wrap(self, module: nn.Module) -> nn.Module:
        wrapped = module
        if any(parameter.requires_grad for parameter in module.parameters()):
            wrapped = DistributedDataParallel(
                module,
                device_ids=[self._device] if self._device.type == "cuda" else None,
                **self._arguments | sends_no_buffers(),
            )
            # Torch's compiler breaks graphs where buckets end, and asserts that none is smaller than DDP's usual first.
            wrapped.bucket_bytes_cap = max(wrapped.bucket_bytes_cap, _SMALLEST_COMPILED)
            # A copy of the wrapper would average, too, and without what gets it ready here.
            vars(wrapped)["__deepcopy__"] = functools.partial(copy.deepcopy, module)
            send_buffers(module)
        else:
            send_values(module)
        replica = self._replicas[wrapped] = _Replica(module, wrapped, self._device, may_leave_out=self._may_leave_out)
        if self._broadcast_buffers:
            replica.hooks.append(wrapped.register_forward_pre_hook(replica.buffers.before_forward))
        return wrapped

    @property
    def _may_leave_out(self) -> bool:
        return bool(self._arguments.get("find_unused_parameters") or self._arguments.get("static_graph"))

    def backward(self, loss: torch.Tensor, module: nn.Module, **kwargs: Any) -> None:
        """Run autograd, and average the gradients of every module the loss came through; every rank calls it.

        Args:
            loss: A scalar, or another tensor with its ``gradient`` among ``kwargs``.
            module: What ``wrap`` returned.
            kwargs: For ``Tensor.backward``.

        Raises:
            SetupError: If the loss has left out parameters that the wrapper waits for.
        """
        for replica in self._replicas.values():
            replica.unsynced.leave_abandoned()
            replica.views.put_back()
            replica.reached.clear()
        replicas, named = list(self._replicas.values()), self._replicas.get(module)
        ready = _passed(loss, [replica for replica in replicas if replica.sends], named)
        for replica in ready:
            loss = replica.get_ready(loss)
        loss.backward(**kwargs)
        for replica in replicas:
            if replica in ready:
                replica.finish()
            else:
                # Other ranks' losses may have reached what this one's has not.
                if replica.reached or replica is named or replica.waits:
                    replica.average()
                replica.note_unsent()
            replica.waits = not replica.synced
            replica.views.note()

    def send_changed(self, optimizer: torch.optim.Optimizer) -> None:
        """Send what forwards have changed of the buffers of modules that an optimizer steps; every rank calls it."""
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for wrapped, replica in list(self._replicas.items()):
            if not held.isdisjoint(replica.parameters):
                replica.buffers.after_step(wrapped)

    def drop_unfinished(self) -> None:
        """Throw away all gradients, and what a backward that an exception has ended was about to send."""
        for replica in self._replicas.values():
            replica.drop_unfinished()

    def check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that no gradient is still deferred of what an optimizer steps.

        Args:
            optimizer: One over parameters of these modules.

        Raises:
            SetupError: If one is: the last backward stood inside the wrapper's own ``no_sync``, or has not ended.
        """
        if in_backward() and dist.get_world_size() > 1:
            raise SetupError(
                "gradients were to be clipped or stepped with inside a backward, by a hook on them, when they are yet "
                "to be averaged over ranks; do so after it, or train under 'fsdp', whose gradients are averaged then."
            )
        waiting = [replica for replica in self._replicas.values() if replica.waits]
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]} if waiting else set()
        if any(not held.isdisjoint(replica.parameters) for replica in waiting):
            raise SetupError(
                "the last backward left gradients on their rank, as no_sync() and require_backward_grad_sync=False of "
                "DistributedDataParallel ask for; run the last one before a step without: "
                "no_backward_sync(model, enabled=not last)."
            )

    def no_sync(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients add up on this rank; the first backward after it averages their sum.

        Args:
            module: What ``wrap`` returned.
        """
        return self._replicas[module].no_sync()

    def teardown(self) -> None:
        """Drop the modules, which run alone from now on, and hooks that other strategies would take for the user's."""
        for wrapped, replica in self._replicas.items():
            for hook in replica.hooks:
                hook.remove()
            if isinstance(wrapped, DistributedDataParallel):  # whose own would still wait for other ranks
                wrapped.forward = forward_of(wrapped.module, self._device)  # type: ignore[method-assign]
        self._replicas.clear()


class _Replica:
    """One module, its wrapper, and how far the backward at hand has come.

    Attributes:
        parameters: All that may ever have a gradient.
        reached: Those the backward at hand has come to.
        waits: Whether the last backward was deferred here, alike on every rank, whatever it has reached.
        mark: What the graph of a forward's outputs is marked with.
        views, buffers: Where the wrapper keeps gradients; what sends buffers.
        hooks: Those that another strategy, or none, would stumble over.
        unsynced: Has the wrapper average nothing in forwards: it gets ready when a backward begins.
    """

    def __init__(self, module: nn.Module, wrapped: nn.Module, device: torch.device, *, may_leave_out: bool) -> None:
        named = {plain_name(name): p for name, p in module.named_parameters() if is_differentiable(p)}
        self.parameters = list(named.values())
        self.trained = {name: p for name, p in named.items() if p.requires_grad}
        self.reached: set[torch.Tensor] = set()
        self.waits, self.mark, self.buffers = False, object(), BufferExchange()
        self.views = BucketViews(self.trained.values() if getattr(wrapped, "gradient_as_bucket_view", False) else ())
        self._others = [p for p in self.parameters if not p.requires_grad]
        self._may_leave_out = may_leave_out
        # What backwards have reached since the last that the wrapper sent: to it, all that is used in the next.
        self._unsent: set[torch.Tensor] = set()
        self._with_gradients: set[torch.Tensor] = set()
        self._sent, self._deferred, self._identity = True, False, nn.Identity()
        # The parameters that the first backward has reached, where all others must reach the same.
        self._graph: frozenset[torch.Tensor] | None = None
        self._wrapper = weakref.ref(wrapped) if isinstance(wrapped, DistributedDataParallel) else None
        self.unsynced = ForwardContexts(Unsynced, Unsynced.leave_late)
        self._nodes = AccumulationNodes(self.trained.values())
        self.hooks = [on_gradient(each, self.reached.add) for each in self.parameters]
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_forward_pre_hook(self.unsynced.begin)
            wrapped.register_forward_hook(self._end_forward, always_call=True)
            if wrapped.static_graph:
                # The wrapper's own forward has the first backward averaged, whatever that comes through.
                wrapped.forward = forward_of(module, device)  # type: ignore[method-assign]

    @property
    def wrapper(self) -> DistributedDataParallel | None:
        """The wrapper; None if nothing was to be trained at setup."""
        return self._wrapper() if self._wrapper is not None else None

    @property
    def _static(self) -> bool:
        return self.wrapper is not None and bool(self.wrapper.static_graph)

    @property
    def synced(self) -> bool:
        """Whether the gradients of a backward are averaged now."""
        return not self._deferred if self.wrapper is None else bool(self.wrapper.require_backward_grad_sync)

    @property
    def sends(self) -> bool:
        """Whether the wrapper shall average the gradients of the coming backward.

        It waits for all that were trained at setup, and hears nothing of one whose dtype has changed. If the graph is
        static it learns from the very first backward, or never: that one is averaged even if it is deferred.
        """
        wrapper = self.wrapper
        if wrapper is None or not all(each.requires_grad for each in self.trained.values()) or self._nodes.left:
            return False
        if not wrapper.static_graph:
            return bool(wrapper.require_backward_grad_sync)
        return self._graph is None or (wrapper.require_backward_grad_sync and bool(self._graph))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients on this rank within."""
        if self.wrapper is not None:
            self.unsynced.leave_abandoned()
            with self.wrapper.no_sync():
                yield
            return
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def get_ready(self, loss: torch.Tensor) -> torch.Tensor:
        """Have the wrapper average the gradients of a loss while its backward runs; return what to go backward from."""
        wrapper = self.wrapper
        assert wrapper is not None
        self._with_gradients = {parameter for parameter in self.parameters if parameter.grad is not None}
        for parameter in self._unsent - self._with_gradients:  # zeroed since, which to the wrapper is an error
            parameter.grad = torch.zeros_like(parameter)
        # It gets ready at the end of a forward, and looks for unused parameters in the graph of what that returns.
        module, wrapper.module = wrapper.module, self._identity
        synced, wrapper.require_backward_grad_sync = wrapper.require_backward_grad_sync, True
        try:
            return cast("torch.Tensor", DistributedDataParallel.forward(wrapper, loss))
        finally:
            wrapper.module = module
            wrapper.require_backward_grad_sync = synced

    def finish(self) -> None:
        """Average what the wrapper has not.

        Raises:
            SetupError: If gradients that it waits for stay away.
        """
        unreached = {name: p for name, p in self.trained.items() if p not in self.reached}
        if self._static:
            reached = self.reached.intersection(self.trained.values())
            self._graph = self._graph or frozenset(reached)
            if self._graph != reached:
                raise SetupError(
                    "static_graph=True promises that every step uses the same parameters, and this loss reached "
                    f"{len(reached)} of them where the first one reached {len(self._graph)}; leave it out."
                )
        if unreached and not self._may_leave_out:
            absent = [name for name, parameter in unreached.items() if parameter.grad is None]
            if absent:
                raise SetupError(
                    "DistributedDataParallel averages only gradients of a loss that reaches every trained parameter, "
                    f"and this one did not reach {len(absent)} of them, first {absent[0]!r}; freeze those with "
                    "requires_grad_(False), add up losses of one forward that reach different ones, go backward from "
                    "all but the last inside no_backward_sync if all of them together reach every one, or pass "
                    "find_unused_parameters=True if other steps use them."
                )
            # Gradients of earlier backwards are waited for too: these add nothing to them.
            torch.autograd.backward(list(unreached.values()), [torch.zeros_like(p) for p in unreached.values()])
        if any(each.requires_grad or each.grad is not None for each in self._others):
            average_gradients(self._others)
        self._take_back_zeros()

    def drop_unfinished(self) -> None:
        """Throw away gradients, and have the wrapper wait for none of the backward at hand."""
        for parameter in self.parameters:
            parameter.grad = None
        self.reached.clear()
        self._unsent, self._with_gradients, self._sent, self.waits = set(), set(), True, False
        if self._static:  # the wrapper learns from its very first backward alone, and that has begun
            self._graph = frozenset()
        if self.wrapper is not None:  # made anew, as where it was pickled, with a reducer that has not begun
            with alone_trained(set(self.trained.values()), self.parameters):
                self.wrapper.__setstate__(self.wrapper.__getstate__())

    def note_unsent(self) -> None:
        """Note what a backward has reached that the wrapper has not sent; every rank calls it."""
        if self._may_leave_out and not self._static:
            self._sent = False
            self._unsent |= self.reached.intersection(self.trained.values())  # of others it knows nothing

    def _take_back_zeros(self) -> None:
        """Take back the zeros that stood for gradients, of parameters that no rank's backward has reached."""
        if not self._sent:
            trained = list(self.trained.values())
            used = self.reached | self._with_gradients
            anywhere = torch.tensor([each in used for each in trained], dtype=torch.int32, device=trained[0].device)
            dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
            for parameter, stays in zip(trained, anywhere.tolist(), strict=True):
                if not stays:
                    parameter.grad = None
        self._sent = True
        self._unsent.clear()

    def average(self) -> None:
        """Average all, after a backward that the wrapper was not ready for."""
        if self._static and self._graph is None:
            self._graph = frozenset()
        if self.synced and self.parameters:
            average_gradients(self.parameters)

    def _end_forward(self, module: DistributedDataParallel, _: Any, output: Any) -> None:
        self.unsynced.leave()
        # What ran where gradients are deferred need not reach all of them.
        for tensor in _tensors(output) if module.require_backward_grad_sync or self._static else ():
            if tensor.grad_fn is not None:
                _metadata(tensor.grad_fn)[self.mark] = True


def _passed(loss: torch.Tensor, replicas: Sequence[_Replica], named: _Replica | None) -> list[_Replica]:
    """List those through whose forwards a loss came, and the named one if all ranks' losses reach all of it otherwise.

    A loss past forward may reach more on one rank than on another, so ranks agree on it; of other modules than the
    named one they would not know that there is something to agree on. The search ends with the last forward: at once
    where the only module's forward has returned the loss.
    """
    missing = {replica.mark: replica for replica in replicas}
    leaves: set[torch.Tensor] = set()
    for node in graph_nodes(loss):
        for mark in [mark for mark in missing if mark in _metadata(node)]:
            del missing[mark]
        if not missing:
            break
        leaf = getattr(node, "variable", None)  # functions of users' own may have one, too
        if isinstance(leaf, torch.Tensor):
            leaves.add(leaf)
    passed = [each for each in replicas if each.mark not in missing]
    for each in replicas:
        if each is named and each not in passed and _on_all_ranks(leaves.issuperset(each.trained.values()), each):
            passed.append(each)
    return passed


def _on_all_ranks(answer: bool, replica: _Replica) -> bool:
    """Return whether every rank's answer is yes."""
    answers = torch.tensor(answer, dtype=torch.int32, device=replica.parameters[0].device)
    dist.all_reduce(answers, op=dist.ReduceOp.MIN)
    return bool(answers)


def _metadata(node: Node) -> dict[object, Any]:
    """Return the dict that users may hang on a node of a graph."""
    return cast("dict[object, Any]", node.metadata)  # torch's stubs take the property for a method


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    """Iterate over the tensors in a nested structure."""
    if isinstance(data, torch.Tensor):
        yield data
    elif is_nested(data):
        if dataclasses.is_dataclass(data):
            data = vars(data)
        for each in data.values() if isinstance(data, Mapping) else data:
            yield from _tensors(each)
