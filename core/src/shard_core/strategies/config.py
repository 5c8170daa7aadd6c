"""The options of the built-in strategies."""

from __future__ import annotations

import dataclasses

from shard_core.errors import InvalidOption
from shard_core.options import option
from shard_core.plugins.shared_config import LayerOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleConfig(LayerOptions):
    """Options of ``single``: those that every engine has.

    Raises:
        InvalidOption: If a value has the wrong type or makes no sense.
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPConfig(LayerOptions):
    """Options of ``ddp``: those of ``torch.nn.parallel.DistributedDataParallel``, and those that every engine has.

    Raises:
        InvalidOption: If a value has the wrong type or makes no sense.
    """

    bucket_cap_mb: float = option(25.0, "how many MiB of gradients travel in one message")
    find_unused_parameters: bool = option(False, "look for parameters a loss does not reach, at each backward")
    gradient_as_bucket_view: bool = option(True, "let gradients live in the messages they travel in")
    static_graph: bool = option(False, "promise that every step uses the same parameters")
    broadcast_buffers: bool = option(True, "send rank 0's buffers to all ranks before forwards, and after steps")

    def __post_init__(self) -> None:
        """Check types and values."""
        super().__post_init__()
        if isinstance(self.bucket_cap_mb, bool) or not isinstance(self.bucket_cap_mb, int | float):
            raise InvalidOption(f"bucket_cap_mb is {self.bucket_cap_mb!r}; give a number of MiB.")
        if self.bucket_cap_mb <= 0:
            raise InvalidOption(f"bucket_cap_mb is {self.bucket_cap_mb!r}; give a number of MiB above zero.")
        for name in (
            "find_unused_parameters",
            "gradient_as_bucket_view",
            "static_graph",
            "broadcast_buffers",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidOption(f"{name} is {getattr(self, name)!r}; give True or False.")
