"""What is alike in every engine whose tensors live on XLA devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shard_core.backend import Engine
from shard_xla.strategy import runtime

if TYPE_CHECKING:
    from shard_xla.config import XLAFSDPConfig, XLASPMDConfig


class XLAEngine(Engine):
    """Builds on the host and draws random numbers on the device; to be inherited beside ``Strategy``, before it."""

    config: XLAFSDPConfig | XLASPMDConfig

    def engine_check_options(self) -> None:
        """Check that the accelerator is one of XLA's."""
        runtime.check_accelerator(self.info.name, self.options.accelerator)

    def engine_seed(self, seed: int) -> None:
        """Seed the device."""
        runtime.seed(seed)

    def engine_random_state(self) -> torch.Tensor:
        """Return the state of the device's generator."""
        return runtime.random_state()

    def engine_set_random_state(self, state: torch.Tensor) -> None:
        """Restore the state of the device's generator."""
        runtime.set_random_state(state)

    def engine_look(self, value: torch.Tensor) -> bool:
        """Run what is pending, and read the value."""
        import torch_xla

        torch_xla.sync()
        return bool(value)

    def engine_copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Compute a copy: copying shares a buffer, which would be given away when one of the two changes in place."""
        return (tensor.detach() | False).to(dtype) if tensor.dtype == torch.bool else (tensor.detach() * 1).to(dtype)

    def engine_checkpoint_form(self) -> str | None:
        """Return the form that the option names."""
        return self.config.state_dict_type
