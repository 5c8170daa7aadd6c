"""Mixed precisions: float32 parameters, ops in 16 bit where torch's autocast lists allow it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from shard_core.precision.dtypes import check_module, convert_module, dtype_named
from shard_core.precision.interface import Precision, PrecisionPolicy
from shard_core.precision.scaler import GradientScaler

if TYPE_CHECKING:
    from torch import nn


class MixedPrecision(Precision):
    """Runs forwards under autocast; in float16 the loss is scaled as well.

    Serves ``"bf16-mixed"`` and ``"16-mixed"``.

    Args:
        policy: The table of dtypes.
        scaler: The gradient scaler; None makes one where the policy asks for it.
    """

    def __init__(self, policy: PrecisionPolicy, scaler: GradientScaler | None = None) -> None:
        self._policy = policy
        self._scaler = scaler or (GradientScaler() if policy.scaled else None)

    @property
    def policy(self) -> PrecisionPolicy:
        """The table of dtypes this part keeps."""
        return self._policy

    @property
    def scaler(self) -> GradientScaler | None:
        """The gradient scaler, in float16."""
        return self._scaler

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Cast floating-point parameters and buffers to float32 where they differ."""
        return convert_module(module, self._policy)

    def check_module(self, module: nn.Module) -> None:
        """Compare real dtypes with the table."""
        check_module(module, self._policy)

    def convert_input(self, data: Any) -> Any:
        """Return inputs as they are: autocast casts where an op asks for it."""
        return data

    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Return an autocast context."""
        return torch.autocast(device_type, dtype=dtype_named(self._policy.compute))
