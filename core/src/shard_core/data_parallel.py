"""Modules under torch's DistributedDataParallel, with gradients that are averaged whatever the order of losses."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shard_core._versions import buffers_sent_count_as_changed
from shard_core.errors import MissingCapability, SetupError
from shard_core.parameters import plain_name
from shard_core.replicas import send_values

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


@dataclasses.dataclass
class _Passes:
    """The forwards and backwards of one wrapper, which gets ready in each forward to send gradients in one backward.

    Attributes:
        forwards: How many forwards may still have a backward.
        sends: Whether the wrapper sends gradients in the next backward.
        reached: Whether the backward at hand has come to its parameters.
    """

    forwards: int = 0
    sends: bool = False
    reached: bool = False

    def note_forward(self, module: DistributedDataParallel, args: Any, output: Any) -> None:
        """Count a forward, as the wrapper's forward hook."""
        del args, output
        if torch.is_grad_enabled():
            self.forwards += 1
            self.sends |= module.require_backward_grad_sync

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Record that the backward has reached a parameter, as its hook."""
        del parameter
        self.reached = True


class DDPModules:
    """The modules of one strategy under ``DistributedDataParallel``, and the backwards through them.

    A wrapper of torch's gets ready in each forward to average the gradients of one backward. What it leaves is
    averaged here, after the backward: gradients of a second backward after one forward, and those of a loss through
    several modules. A module without gradients stays as it is.

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
        self._passes: weakref.WeakKeyDictionary[DistributedDataParallel, _Passes] = weakref.WeakKeyDictionary()
        self._trained: weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, torch.nn.Parameter]] = (
            weakref.WeakKeyDictionary()
        )
        self._hooks: list[RemovableHandle] = []

    def wrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Wrap a module, and send rank 0's values to all ranks.

        Args:
            module: On its device, with the same parameters on every rank.

        Returns:
            The ``DistributedDataParallel`` around it; the module itself if nothing in it is to be trained.
        """
        if not any(parameter.requires_grad for parameter in module.parameters()):
            # DistributedDataParallel refuses a module without gradients; there is nothing to average.
            send_values(module)
            return module
        wrapped = DistributedDataParallel(
            module,
            device_ids=[self._device] if self._device.type == "cuda" else None,
            **self._arguments | _sending_buffers(self._broadcast_buffers),
        )
        trained = {plain_name(name): p for name, p in module.named_parameters() if p.requires_grad}
        self._trained[wrapped] = trained
        self._passes[wrapped] = passes = _Passes()
        wrapped.register_forward_hook(passes.note_forward)
        # Where every loss reaches every parameter, a hook on one of them is enough.
        for parameter in list(trained.values())[: None if self._may_leave_out else 1]:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(passes.note_gradient))
        if self._broadcast_buffers and buffers_sent_count_as_changed():
            send_values(module)
            wrapped.register_forward_pre_hook(_send_buffers)
        return wrapped

    @property
    def _may_leave_out(self) -> bool:
        return bool(self._arguments.get("find_unused_parameters") or self._arguments.get("static_graph"))

    def backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd, and average what the wrappers do not send; every rank calls it.

        Args:
            loss: A scalar, or another tensor with its ``gradient`` among ``kwargs``.
            module: What ``wrap`` returned.
            kwargs: For ``Tensor.backward``.

        Raises:
            SetupError: If the loss has left out parameters that the wrapper waits for.
        """
        if isinstance(module, DistributedDataParallel):
            passes = self._passes[module]
            if not passes.forwards:
                raise MissingCapability(
                    "DistributedDataParallel does not promise ENTRY_METHODS: this loss did not come through the module "
                    "that setup returned, whose every forward has had its backward; call that module, not a method of "
                    "unwrap(module), or give the earlier backward retain_graph=True if both losses are of one forward."
                )
            passes.forwards -= not kwargs.get("retain_graph")
        loss.backward(**kwargs)
        # The loss may have come through several modules.
        for wrapped, passes in self._passes.items():
            if not passes.reached and wrapped is not module:
                continue
            sent, passes.sends, passes.reached = passes.sends, False, False
            if not wrapped.require_backward_grad_sync:
                continue
            if sent:
                self._refuse_unreached(wrapped)
            else:
                _average(list(self._trained[wrapped].values()))

    def no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients add up on this rank; the first backward after it averages their sum.

        Args:
            module: What ``wrap`` returned.
        """
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    def teardown(self) -> None:
        """Remove the hooks from parameters: another strategy would take them for the user's."""
        for hook in self._hooks:
            hook.remove()

    def _refuse_unreached(self, wrapped: DistributedDataParallel) -> None:
        """Refuse a step with gradients that stayed on their rank: a bucket waits for all of its parameters."""
        if self._may_leave_out:
            return
        unreached = [name for name, parameter in self._trained[wrapped].items() if parameter.grad is None]
        if unreached:
            raise SetupError(
                "DistributedDataParallel can only average gradients of a loss that reaches every trained parameter; "
                f"this one did not reach {len(unreached)} of them, first {unreached[0]!r}; freeze those with "
                "requires_grad_(False) before setup, add up losses of one forward that reach different ones, or pass "
                "find_unused_parameters=True if other steps use them."
            )


def _sending_buffers(wanted: bool) -> dict[str, bool]:
    """Return whether buffers are to be sent before each forward as this torch's DistributedDataParallel names it."""
    if buffers_sent_count_as_changed():
        wanted = False  # they are sent by a hook of ours
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        return {"forward_sync_buffers": wanted}
    return {"broadcast_buffers": wanted}


@torch.no_grad()
def _average(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients over ranks; what was averaged before stays, so sums over backwards come out right."""
    reached = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    reached = reached.to(parameters[0].device)
    dist.all_reduce(reached, op=dist.ReduceOp.MAX)
    messages = []
    for parameter, anywhere in zip(parameters, reached.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            messages.append(dist.all_reduce(parameter.grad.div_(dist.get_world_size()), async_op=True))
    for message in messages:
        message.wait()


def _send_buffers(module: torch.nn.Module, args: Any) -> None:
    """Broadcast rank 0's buffers, unnoticed by backwards of earlier forwards, which may still read them."""
    del args
    for buffer in module.buffers():
        dist.broadcast(buffer.data, src=0)
