"""The collectives of upstream's wrapper, over the host: each waits for the device, talks through gloo and goes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shard_core.backend import translate_torch_errors

_KINDS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "mul": dist.ReduceOp.PRODUCT,
}


class AllGather:
    """Joins every rank's parts of a unit's parameters; however many calls upstream makes for them, it is one message.

    Args:
        missing: Lists the shards whose whole parameters the unit lacks, in the order in which it will ask.
    """

    def __init__(self, missing: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._missing = missing
        self._ahead: list[torch.Tensor] = []

    @torch.no_grad()
    def __call__(self, value: Any, dim: int = 0, groups: Any = None, **kwargs: Any) -> Any:
        """Join the parts of one tensor, or of each tensor of a list.

        Args:
            value: A shard, perhaps in another shape, or a list of them.
            dim: The first: shards are nothing else.
            groups: Upstream's; all ranks shard as one group here.
            kwargs: Upstream's, about layouts.

        Returns:
            A tensor, or a list.
        """
        assert dim == 0, dim
        del groups, kwargs
        if isinstance(value, list | tuple):
            return [self._joined(each, rows) for each, rows in zip(value, self._gathered(value), strict=True)]
        if not self._ahead:
            self._ahead = self._gathered(self._missing())
        return self._joined(value, self._ahead.pop(0))

    def _gathered(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return _exchanged([each.view(1, -1) for each in _on_host(tensors)], _gathered)

    def _joined(self, value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return rows.reshape(-1, *value.shape[1:]).to(value.device)


@torch.no_grad()
def all_reduce(kind: str, value: Any, scale: float = 1.0, groups: Any = None, **kwargs: Any) -> Any:
    """Reduce a tensor over ranks into a new one.

    Args:
        kind: ``"sum"``, ``"max"``, ``"min"`` or ``"mul"``.
        value: A tensor.
        scale: What the result is multiplied by.
        groups: Upstream's; all ranks reduce as one group here.
        kwargs: Upstream's, about layouts.

    Returns:
        The same on every rank.
    """
    del groups, kwargs
    (host,) = _on_host([value])
    reduced = host.clone()
    with translate_torch_errors("a reduction of the engine's"):
        dist.all_reduce(reduced, _KINDS[kind])
    return (reduced * scale if scale != 1.0 else reduced).to(value.device)


class ReduceScatter:
    """Adds gradients up over ranks and leaves each its part; several share a message.

    Args:
        bucket_bytes: Gradients wait for one another until they weigh more than this; 0 for all of a unit's.

    Attributes:
        scale: What sums are multiplied by; upstream sets it.
        check: Is called before a message: messages of ranks that have used different parameters differ in length.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.scale = 1.0
        self.check: Callable[[], None] = lambda: None
        self._limit = bucket_bytes
        self._waiting: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []

    def __call__(self, gradient: torch.Tensor, done: Callable[[torch.Tensor], None]) -> None:
        """Reduce and scatter a gradient whose first dim divides by the number of ranks.

        Args:
            gradient: This rank's, whole.
            done: Is handed this rank's part of the sum.
        """
        self._waiting.append((gradient, done))
        waits = sum(each.numel() * each.element_size() for each, _ in self._waiting)
        if self._limit and waits > self._limit:
            self.flush()

    def flush(self) -> None:
        """Check that ranks wait for the same, and send it."""
        if self._waiting:
            self.check()
        self.send()

    def drop(self) -> None:
        """Throw away what waits."""
        self._waiting.clear()

    @torch.no_grad()
    def send(self) -> None:
        """Send what waits."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        ranks = dist.get_world_size()
        gradients = [gradient for gradient, _ in waiting]
        rows = [host.reshape(ranks, -1) for host in _on_host(gradients)]
        for (gradient, done), part in zip(waiting, _exchanged(rows, _reduced), strict=True):
            shape = (gradient.shape[0] // ranks, *gradient.shape[1:])
            scaled = part * self.scale if self.scale != 1.0 else part
            done(scaled.reshape(shape).to(gradient.device))


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors to the host; the whole pending graph runs first, or each copy would compile a piece of it again."""
    import torch_xla

    torch_xla.sync()
    return [tensor.detach().cpu().contiguous() for tensor in tensors]


def _exchanged(tensors: Sequence[torch.Tensor], exchange: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Send the columns of tensors with equally many rows in one message per dtype."""
    results: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        received = exchange(torch.cat([tensors[place] for place in places], dim=1))
        parts = received.split([tensors[place].shape[1] for place in places], dim=1)
        results |= dict(zip(places, parts, strict=True))
    return [results[place] for place in range(len(tensors))]


def _gathered(row: torch.Tensor) -> torch.Tensor:
    rows = row.new_empty((dist.get_world_size(), row.shape[1]))
    with translate_torch_errors("a gather of parameters"):
        dist.all_gather_into_tensor(rows, row)
    return rows


def _reduced(rows: torch.Tensor) -> torch.Tensor:
    row = rows.new_empty((1, rows.shape[1]))
    with translate_torch_errors("a reduction of gradients"):
        dist.reduce_scatter_tensor(row, rows)
    return row
