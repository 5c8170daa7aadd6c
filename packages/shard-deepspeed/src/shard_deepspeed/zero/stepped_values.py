"""The parameters that optimizers step, which notice what is written to them through ``data``."""

from __future__ import annotations

import torch

from shard_core import SetupError


class SteppedValues(torch.nn.Parameter):
    """The values of this rank's part of a parameter, as an optimizer's groups hold them.

    Autograd counts what is written in place, and not what is written through ``data``, as many optimizers and wrappers
    of optimizers write. So values are summed up when ``data`` is first asked for, and once more when somebody asks
    whether there was a write; where nobody asks for ``data`` that costs nothing. What is assigned to it is copied, for
    the memory is DeepSpeed's.

    Attributes:
        is_closed: Whether the module that they are of has them no longer.
    """

    is_closed: bool = False
    _seen: int | None = None
    _uncounted: int = 0
    _in_step: bool = False

    @property
    def data(self) -> torch.Tensor:
        """The same memory, of which writes are not counted."""
        if self._seen is None and not self._in_step:
            self._seen = self._sum()
        return self.uncounted()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        if values.shape != self.shape:
            raise SetupError(
                f"a part of shape {tuple(self.shape)} was given data of shape {tuple(values.shape)}; keep the shape."
            )
        with torch.no_grad():
            self.copy_(values)

    def uncounted(self) -> torch.Tensor:
        """Return the same memory, for writes of our own that nobody is to take for a user's."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @property
    def asked_for(self) -> bool:
        """Whether somebody may have written since ``settle``, alike on all ranks of one program."""
        return self._seen is not None

    def settle(self, *, in_step: bool = False) -> None:
        """Take values as they are for those nobody has written to.

        Args:
            in_step: Whether a step begins, after which values are published in any case.
        """
        self._seen, self._in_step = None, in_step

    def writes(self) -> int:
        """Count what was written in place, and through ``data`` since ``settle``."""
        if self._seen is not None and self._seen != (seen := self._sum()):
            self._seen, self._uncounted = seen, self._uncounted + 1
        return self._version + self._uncounted

    def _sum(self) -> int:
        """Add up the bits."""
        return int(self.uncounted().view(torch.int32).sum(dtype=torch.int64))


def check_open(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Check, as a hook before steps, that the module still has the values that an optimizer holds of it.

    Raises:
        SetupError: If not.
    """
    held = (each for group in optimizer.param_groups for each in group["params"])
    if any(isinstance(each, SteppedValues) and each.is_closed for each in held):
        raise SetupError(
            f"this {type(optimizer).__name__} holds parts of a module whose strategy was torn down, and its step would "
            "not change the module; make another optimizer over the module's parameters."
        )
