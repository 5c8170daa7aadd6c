"""Which dtype where: the table every backend is held to, and the part that applies it."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from shard_core.precision.scaler import GradientScaler


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrecisionPolicy:
    """One row of dtypes, as names, so that it can be shown without torch.

    Attributes:
        name: The word users type, e.g. ``"bf16-mixed"``.
        parameter: What parameters are stored in, and what the optimizer steps on.
        compute: What matrix products run in.
        reduce: What gradients travel in.
        accumulate: What gradients are summed in over micro-batches.
        optimizer: What optimizer state is stored in.
        buffer: What floating-point buffers are stored in.
        autocast: Whether ops follow torch's autocast lists instead of a plain cast of everything.
        scaled: Whether the loss is scaled up so that small float16 gradients survive.
    """

    name: str
    parameter: str
    compute: str
    reduce: str
    accumulate: str
    optimizer: str
    buffer: str
    autocast: bool = False
    scaled: bool = False


class Precision(abc.ABC):
    """Applies one policy to modules and inputs; held by every strategy.

    Order of calls: ``convert_module`` at setup, ``check_module`` when setup is done,
    ``convert_input`` and ``forward_context`` around every forward.
    """

    @property
    @abc.abstractmethod
    def policy(self) -> PrecisionPolicy:
        """The table of dtypes this part keeps."""

    @property
    def scaler(self) -> GradientScaler | None:
        """The gradient scaler, if this precision scales the loss."""
        return None

    @property
    def plain_forward(self) -> bool:
        """Whether a forward needs neither a context nor a cast of its inputs."""
        return False

    @abc.abstractmethod
    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Cast floating-point parameters and buffers to the policy's dtypes, in place."""

    @abc.abstractmethod
    def check_module(self, module: torch.nn.Module) -> None:
        """Raise ``PrecisionMismatch`` naming the first tensor that breaks the policy."""

    @abc.abstractmethod
    def convert_input(self, data: Any) -> Any:
        """Cast the floating-point tensors in a nested structure to what forward expects."""

    @abc.abstractmethod
    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Return the context every forward runs in."""

    def state_dict(self) -> dict[str, Any]:
        """Return what must survive a restart, as JSON values: the gradient scaler's state."""
        return self.scaler.state_dict() if self.scaler else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned; a checkpoint without a gradient scaler leaves it fresh."""
        if self.scaler and state:
            self.scaler.load_state_dict(state)
