"""What is replicated on every rank: values from rank 0 at the start, and averaged gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shard_core.errors import SetupError
from shard_core.gradients import is_differentiable, on_gradient
from shard_core.initialization.recording import is_recorded

#: Parts of modules that a strategy has left without the values of their own parameters.
_left_empty: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_left_empty(part: nn.Module) -> None:
    """Record that a teardown has left a part of a module without the values of parameters, for ``check_whole``."""
    _left_empty.add(part)


def check_whole(module: nn.Module) -> None:
    """Check that every rank has whole parameters, as before a first setup, and can train those it is to train.

    Args:
        module: What is to be set up.

    Raises:
        SetupError: Naming the first parameter that is spread over ranks already, or an inference tensor.
    """
    named = (
        (name, each, part) for name, part in module.named_modules() for each in part.named_parameters(recurse=False)
    )
    for prefix, (name, parameter), part in named:
        is_shard = isinstance(parameter, DTensor) and parameter.device_mesh.size() > 1
        if is_shard or (part in _left_empty and not parameter.numel()):
            raise SetupError(
                f"parameter {f'{prefix}.{name}'.removeprefix('.')!r} is spread over ranks already, as another setup or "
                "torch's own functions leave it; set up a module that is made anew, and give it the weights with "
                "load_checkpoint or load_weights."
            )
        if parameter.requires_grad and parameter.is_inference() and not is_recorded(parameter):
            raise SetupError(
                f"parameter {f'{prefix}.{name}'.removeprefix('.')!r} was made in torch.inference_mode(), and torch "
                "computes no gradient with it, ever; make the module outside, under torch.no_grad() perhaps, or call "
                "requires_grad_(False) where it is evaluated alone."
            )


def send_values(module: nn.Module) -> None:
    """Broadcast the values of rank 0's parameters and buffers to every rank.

    Args:
        module: The same on every rank but for values; tensors that have none yet are left out.
    """
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if not is_recorded(tensor) and dist.get_world_size() > 1:
                dist.broadcast(tensor.data, src=0)


class AveragedGradients:
    """Averages the gradients of parameters that are whole on every rank.

    Each is sent as backward makes it, so the losses of all ranks have to reach the same parameters. Where they need
    not, or where an engine defers, it calls ``end_backward`` after each backward, and all are sent then.

    Args:
        parameters: Those the engine has not sharded.
        at_end: Whether the engine calls ``end_backward``.

    Attributes:
        deferred: While True, gradients add up on this rank; the next backward averages their sum.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], *, at_end: bool = False) -> None:
        self.deferred = False
        self._parameters = [each for each in parameters if is_differentiable(each)]
        for parameter in () if at_end else self._parameters:
            on_gradient(parameter, self._average)

    def end_backward(self) -> None:
        """Average what this backward and deferred ones have left, unless it is deferred, too; every rank calls this."""
        if self._parameters and not self.deferred:
            average_gradients(self._parameters)

    def drop(self) -> None:
        """Throw away all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _average(self, parameter: torch.Tensor) -> None:
        # Averaging what was averaged before changes nothing, so the sum over micro-batches comes out right.
        if not self.deferred and parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


_SPARSE, _DENSE = 1, 2


def _layout(gradient: torch.Tensor | None) -> int:
    """Return a number for a gradient's layout, larger where it can hold the other's, and 0 for none."""
    return 0 if gradient is None else _SPARSE if gradient.is_sparse else _DENSE


@torch.no_grad()
def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Average gradients over all ranks, any of which may lack some; those that no rank has stay None.

    What was averaged before stays as it is, so that sums over backwards come out right.

    Args:
        parameters: The same on every rank, at least one.
    """
    layouts = torch.tensor([_layout(parameter.grad) for parameter in parameters], dtype=torch.int32)
    layouts = layouts.to(parameters[0].device)
    dist.all_reduce(layouts, op=dist.ReduceOp.MAX)
    messages = []
    for parameter, layout in zip(parameters, layouts.tolist(), strict=True):
        if layout:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if layout != _layout(parameter.grad):
                parameter.grad = parameter.grad.to_sparse(1) if layout == _SPARSE else parameter.grad.to_dense()
            messages.append(dist.all_reduce(parameter.grad.div_(dist.get_world_size()), async_op=True))
    for message in messages:
        message.wait()
