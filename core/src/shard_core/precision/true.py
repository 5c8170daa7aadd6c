"""Precisions with one dtype for everything: ``"32-true"``, ``"64-true"``, ``"bf16-true"``, ``"16-true"``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shard_core.precision.dtypes import check_module, convert_input, convert_module, dtype_named
from shard_core.precision.interface import Precision, PrecisionPolicy

if TYPE_CHECKING:
    import torch


class TruePrecision(Precision):
    """Keeps parameters, buffers, arithmetic and optimizer state in one dtype.

    Inputs are cast along, except in float32, where they come as in plain PyTorch.

    Args:
        policy: The table of dtypes.
    """

    def __init__(self, policy: PrecisionPolicy) -> None:
        self._policy = policy

    @property
    def policy(self) -> PrecisionPolicy:
        """The table of dtypes this part keeps."""
        return self._policy

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

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing: there is no state."""
