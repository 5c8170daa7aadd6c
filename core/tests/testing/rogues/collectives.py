"""Mistakes made where ranks talk."""

from __future__ import annotations

from typing import Any

import torch

from rogues.rogue import Rogue
from shard_core.errors import CollectiveError


class MaxIsSum(Rogue):
    """Returns the sum where the maximum is asked for."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        return self.inner.all_reduce(tensor, group, "sum" if reduce_op == "max" else reduce_op)


class ReducesInPlace(Rogue):
    """Leaves the sums of vectors in the tensors it was given."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        result = self.inner.all_reduce(tensor, group, reduce_op)
        return tensor.detach().copy_(result) if result.ndim == 1 else result


class RankDependent(Rogue):
    """Reduces to a result that differs from rank to rank in the last bit."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        result = self.inner.all_reduce(tensor, group, reduce_op)
        if self.inner.is_global_zero or result.dtype not in (torch.float32, torch.float64):
            return result
        return torch.nextafter(result, torch.full_like(result, torch.inf))


class ReducesNothing(Rogue):
    """Returns what it was given instead of reducing it."""

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        return tensor


class ReturnsLocalValues(Rogue):
    """Returns structures as they are, with each rank's own values."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if isinstance(tensor, dict) else self.inner.all_reduce(tensor, group, reduce_op)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return tensor if isinstance(tensor, dict) else self.inner.reduce(tensor, group, reduce_op)


class GathersBackwards(Rogue):
    """Gathers in the wrong order."""

    def all_gather(self, *args: Any, **more: Any) -> torch.Tensor:
        return self.inner.all_gather(*args, **more).flip(0)


class DropsSyncGrads(Rogue):
    """Gathers without a way back for gradients."""

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        return self.inner.all_gather(tensor, group)


class BroadcastsFromZero(Rogue):
    """Hands out rank 0's object, whoever's was asked for."""

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return self.inner.broadcast(obj)


class GathersItsOwnObject(Rogue):
    """Hands every rank its own object for all."""

    def all_gather_object(self, obj: Any) -> Any:
        return [obj for _ in self.inner.all_gather_object(obj)]


class CountsFillers(Rogue):
    """Joins the batches of ranks one after the other, with what fills the last round up."""

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False, **more: Any) -> Any:
        if isinstance(data, dict):
            return {key: self.gather_for_metrics(each) for key, each in data.items()}
        if isinstance(data, list):
            return [each for theirs in self.inner.all_gather_object(data) for each in theirs]
        return self.inner.all_gather(data).flatten(0, 1)


class NeverWaits(Rogue):
    """Lets ranks pass a barrier at once."""

    def barrier(self, name: str | None = None) -> None:
        pass


class UnknownIsMean(Rogue):
    """Takes a reduction it does not know for the mean."""

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> torch.Tensor:
        try:
            return self.inner.all_reduce(tensor, group, reduce_op)
        except CollectiveError:
            return self.inner.all_reduce(tensor, group)
