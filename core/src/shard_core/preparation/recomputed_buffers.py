"""Buffers that a layer's forward changes, which activation checkpointing would change a second time."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from shard_core.parameters import local_part

#: Which parts of a layer train.
_Modes = tuple[bool, ...]


class RecomputedBuffers:
    """Runs layers again as they ran before: with the buffers of then, and without a trace in those of now.

    Running statistics of batch normalisation would be updated twice a step, and what reads a buffer that it changes
    would compute with another one. Which buffers a layer changes is found out in its first forward, and again when
    parts of it are set to train or to evaluate.
    """

    def __init__(self) -> None:
        self._changing: weakref.WeakKeyDictionary[nn.Module, dict[_Modes, frozenset[str]]] = weakref.WeakKeyDictionary()

    def contexts(
        self, layer: nn.Module
    ) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """Return the contexts of one forward and of its recomputations.

        Args:
            layer: The one that is checkpointed.
        """
        before: dict[str, torch.Tensor] = {}
        return self._forward(layer, before), _Recomputation(layer, before)

    @contextlib.contextmanager
    def _forward(self, layer: nn.Module, before: dict[str, torch.Tensor]) -> Iterator[None]:
        modes = tuple(part.training for part in layer.modules())
        changing = self._changing.setdefault(layer, {})
        known = changing.get(modes)
        before.update(
            (name, buffer.detach().clone()) for name, buffer in layer.named_buffers() if known is None or name in known
        )
        yield
        if known is None:
            now = dict(layer.named_buffers())
            same = [name for name in before if torch.equal(local_part(before[name]), local_part(now[name]))]
            for name in same:
                del before[name]
            changing[modes] = frozenset(before)


class _Recomputation(contextlib.AbstractContextManager[None]):
    """Lends a layer its buffers of then, anew each time it runs."""

    def __init__(self, layer: nn.Module, before: dict[str, torch.Tensor]) -> None:
        self._layer = layer
        self._before = before
        self._now: list[tuple[nn.Module, str, torch.Tensor]] = []

    def __enter__(self) -> None:
        for name, value in self._before.items():
            path, _, attribute = name.rpartition(".")
            owner = self._layer.get_submodule(path)
            self._now.append((owner, attribute, owner.get_buffer(attribute)))
            setattr(owner, attribute, value.clone())

    def __exit__(self, *exception: object) -> None:
        for owner, attribute, buffer in self._now:
            setattr(owner, attribute, buffer)
        self._now.clear()
