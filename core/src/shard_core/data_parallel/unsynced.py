"""Forwards in which torch's DistributedDataParallel gets ready for no backward."""

from __future__ import annotations

from typing import Any


class Unsynced:
    """Has a wrapper average no gradients within: it gets ready when a backward begins.

    Args:
        wrapper: A ``DistributedDataParallel``.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._before = True

    def __enter__(self) -> None:
        """Have it average none."""
        self._before = self._wrapper.require_backward_grad_sync
        self._wrapper.require_backward_grad_sync = False

    def __exit__(self, *exception: object) -> None:
        """Have it average as before."""
        self._wrapper.require_backward_grad_sync = self._before

    def leave_late(self) -> None:
        """Leave it, unless the wrapper's own ``no_sync`` around it has ended and set anew what this would undo."""
        if not self._wrapper.require_backward_grad_sync:
            self.__exit__()
