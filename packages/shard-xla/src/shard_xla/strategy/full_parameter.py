"""A full parameter, which computes, kept in step with the shard that users see and optimizers step."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from typing import TYPE_CHECKING

import torch

from shard_core import SetupError
from shard_xla import _versions

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


@dataclasses.dataclass(kw_only=True, eq=False)
class FullParameter:
    """A full parameter and its shard, as they were last seen.

    Attributes:
        name: The user's.
        full: What computes.
        shard: What users see.
    """

    name: str
    full: torch.Tensor
    shard: nn.Parameter

    def __post_init__(self) -> None:
        self._trains = self.shard.requires_grad
        self._hooks = 0
        self._reach = _Reach()
        self._shown: tuple[torch.Tensor, int] | None = None
        self._changes = _versions.changes_of(self.shard), _versions.changes_of(self.full)
        self._memory = weakref.ref(self.shard.untyped_storage())
        self._watch()

    @property
    def reached(self) -> bool:
        """Whether the backward that runs, or ran last, has made a gradient for it on this rank."""
        return self._reach.came and self._trains

    @property
    def waits(self) -> bool:
        """Whether a gradient is kept on this rank, to be sent by a later backward."""
        return self.full.grad is not None

    def begin_backward(self) -> None:
        """Forget what the backward before has reached."""
        self._reach.came = False

    @torch.no_grad()
    def keep_writes(self, part_of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Write to the shard what was written to the whole parameter while it was there, as forwards do.

        Args:
            part_of: Returns this rank's part of it.
        """
        if _versions.changes_of(self.full) == self._changes[1] or not _versions.is_whole(self.full):
            return
        values = part_of(self.full)
        # Where they are the shard's own, rounded, it keeps its finer ones.
        self.shard.copy_(torch.where(values == self.shard.to(values.dtype), self.shard, values.to(self.shard.dtype)))
        self._changes = _versions.changes_of(self.shard), _versions.changes_of(self.full)

    def follow_values(self) -> bool:
        """Return whether the shard has changed, in place or by other ``data``; autograd then learns of it, too.

        Raises:
            SetupError: If the whole parameter was changed instead, when it was away.
        """
        shard, full = self._changes
        if _versions.changes_of(self.full) != full:
            raise SetupError(
                f"parameter {self.name!r} was changed in place through its module's attribute, when nothing of it "
                "was there: only a forward has whole weights, which are gathered anew for the next; change what "
                "parameters() gives: the shards."
            )
        memory = self.shard.untyped_storage()
        if _versions.changes_of(self.shard) == shard and self._memory() is memory:
            return False
        self._memory = weakref.ref(memory)
        torch.autograd.graph.increment_version(self.full)
        self._changes = _versions.changes_of(self.shard), _versions.changes_of(self.full)
        return True

    def follow_flag(self) -> None:
        """Freeze or unfreeze what computes; the user may have reached for the shard or for the whole parameter.

        Gradients that are kept on this rank stay, as those of what was frozen do in plain PyTorch. A backward through
        forwards of before gives none to what is frozen by then, and reaches what was unfrozen since by no way.

        Raises:
            SetupError: If a hook would never run.
        """
        if _versions.hooks_of(self.shard) != self._hooks:
            raise SetupError(
                f"parameter {self.name!r} got a hook on its gradient, which would never run: gradients are reduced "
                "past autograd; change them between backward() and optimizer_step()."
            )
        if self.shard.requires_grad == self.full.requires_grad == self._trains:
            return
        self._trains = not self._trains
        self.shard.requires_grad_(self._trains)
        self.full.requires_grad_(self._trains)
        self._watch()

    def show_gradient(self) -> None:
        """Set the shard's gradient to zeros, to which the sum will be added, to show that one is kept."""
        if self.shard.grad is None:
            self.shard.grad = torch.zeros_like(self.shard)
        self._shown = self.shard.grad, _versions.changes_of(self.shard.grad)

    @property
    def touched(self) -> bool:
        """Whether what is kept was thrown away or changed: only what the shard shows was."""
        if not self.waits or self._shown is None:
            return False
        gradient, changes = self._shown
        return self.shard.grad is not gradient or _versions.changes_of(gradient) != changes

    def drop_gradient(self) -> bool:
        """Throw away what is kept, and what the shard shows for it.

        Returns:
            Whether the shard still showed something.
        """
        kept = self._shown is not None and self.shard.grad is not None
        self.full.grad = self.shard.grad = self._shown = None
        return kept

    def hide_gradient(self) -> None:
        """Forget what the shard shows, before a backward adds to it."""
        self._shown = None

    def _watch(self) -> None:
        if self._trains and not self._hooks:
            self.shard.register_hook(functools.partial(_refuse_loss_of_shards, self.name))
            self._hooks = _versions.hooks_of(self.shard)
            self.full.register_hook(functools.partial(_note, self._reach))


@dataclasses.dataclass(kw_only=True, eq=False)
class _Reach:
    """Whether a gradient came; apart from the parameter, which its own hook would keep alive."""

    came: bool = False


def _note(reach: _Reach, gradient: torch.Tensor) -> None:
    del gradient
    reach.came = True


def _refuse_loss_of_shards(name: str, gradient: torch.Tensor) -> None:
    del gradient
    raise SetupError(
        f"the loss was computed from this rank's shard of parameter {name!r}, not from the whole parameter; compute it "
        "inside the module's forward from the attribute (self.weight, not parameters()), or use the optimizer's "
        "weight_decay for a penalty on weights."
    )
