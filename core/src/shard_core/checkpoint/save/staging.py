"""Staging: copies of tensors in host memory, made while training goes on."""

from __future__ import annotations

import torch


class Staging:
    """Copies what may change soon at once, and the rest when training has gone on.

    On CUDA all copies go to pinned memory: those made at once in the order of training's own work, the others on a
    stream of their own, from the moment this was created.

    Example:
        >>> weight = torch.ones(2)
        >>> copies = Staging()
        >>> first = copies.now(weight)
        >>> copies.finish()
        >>> weight.zero_(), first
        (tensor([0., 0.]), tensor([1., 1.]))
    """

    def __init__(self) -> None:
        cuda = torch.cuda.is_initialized()
        self._begun = torch.cuda.current_stream().record_event() if cuda else None
        self._stream: torch.cuda.Stream | None = None
        self._last: torch.cuda.Event | None = None

    def now(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor as it is; the copy may be read after ``finish``."""
        copy = _copied(tensor)
        if tensor.is_cuda:
            self._last = torch.cuda.current_stream(tensor.device).record_event()
        return copy

    def later(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor that is still as it was when this was made; the copy may be read after ``finish``."""
        if not tensor.is_cuda:
            return _copied(tensor)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
            if self._begun is not None:
                self._stream.wait_event(self._begun)
        with torch.cuda.stream(self._stream):
            return _copied(tensor)

    def finish(self) -> None:
        """Wait for all copies."""
        if self._last is not None:
            self._last.synchronize()
        if self._stream is not None:
            self._stream.synchronize()


@torch.no_grad()
def _copied(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return copy.copy_(tensor, non_blocking=tensor.is_cuda)
