"""Mistakes about what ranks hold copies of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rogues.rogue import Rogue

if TYPE_CHECKING:
    import torch


class SendsNothing(Rogue):
    """Leaves each rank with the values that it has built."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        own = [*module.parameters(), *module.buffers()]
        return _with_own_values(own, self.inner.setup_module_and_optimizers, module, optimizers)


class SendsParametersOnly(Rogue):
    """Leaves each rank with the buffers that it has built."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        return _with_own_values(module.buffers(), self.inner.setup_module_and_optimizers, module, optimizers)


class ShowsItsOwnBuffers(Rogue):
    """Shows buffers as they are on the rank that is asked."""

    def full_parameters(self, module: Any) -> Iterator[tuple[str, torch.Tensor]]:
        own = dict(self.inner.unwrap(module).named_buffers())
        for name, tensor in self.inner.full_parameters(module):
            yield name, own.get(name, tensor)


class AveragesTheNamedAlone(Rogue):
    """Leaves on their rank the gradients that wait in other modules than the named, and takes their wait for over."""

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        named = self.inner.unwrap(module)
        others = [known.module for known in self.inner._registry if known.last_inside and known.module is not named]
        waiting = [each for other in others for each in other.parameters() if each.grad is not None]
        own = [each.grad.clone() for each in waiting]
        self.inner.backward(loss, module, **more)
        for parameter, gradient in zip(waiting, own, strict=True):
            parameter.grad.copy_(gradient)


def _with_own_values(tensors: Iterable[torch.Tensor], setup: Any, *arguments: Any) -> Any:
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors]
    ready = setup(*arguments)
    for tensor, own in kept:
        tensor.data.copy_(own)
    return ready


class DividesSparseTwice(Rogue):
    """Averages sparse gradients, and divides them by the number of ranks once more."""

    def backward(self, loss: torch.Tensor, module: Any, **more: Any) -> None:
        self.inner.backward(loss, module, **more)
        for parameter in module.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad.div_(self.inner.world_size)
