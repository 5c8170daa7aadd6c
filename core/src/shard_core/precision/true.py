"""Precisions with one dtype for everything: ``"32-true"``, ``"64-true"``, ``"bf16-true"``, ``"16-true"``."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from shard_core.precision.dtypes import check_module, convert_input, convert_module, dtype_named
from shard_core.precision.interface import Precision, PrecisionPolicy
from shard_core.precision.scaler import GradientScaler

if TYPE_CHECKING:
    import torch


class TruePrecision(Precision):
    """Keeps parameters, buffers, arithmetic and optimizer state in one dtype.

    Inputs are cast along, except in float32, where they come as in plain PyTorch. Where an engine steps float32 copies
    of float16 parameters, its policy may have the loss scaled.

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
        """The gradient scaler, where the policy asks for one."""
        return self._scaler

    @property
    def plain_forward(self) -> bool:
        """Whether it is float32, which is what PyTorch does by itself."""
        return self._policy.compute == "float32"

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Cast floating-point parameters and buffers where they differ."""
        return convert_module(module, self._policy)

    def check_module(self, module: torch.nn.Module) -> None:
        """Compare real dtypes with the table."""
        check_module(module, self._policy)

    def convert_input(self, data: Any) -> Any:
        """Cast floating-point tensors to the compute dtype."""
        return data if self.plain_forward else convert_input(data, dtype_named(self._policy.compute))

    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that does nothing."""
        del device_type
        return contextlib.nullcontext()
