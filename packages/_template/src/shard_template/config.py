"""The options of the strategy of this package."""

from __future__ import annotations

import dataclasses

from shard_core import InvalidOption
from shard_core.plugins import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """Options of ``template``.

    Raises:
        InvalidOption: If a value has the wrong type or makes no sense.
    """

    send_buffers: bool = option(False, "send rank 0's buffers to all ranks after each backward")

    def __post_init__(self) -> None:
        """Check types and values."""
        if not isinstance(self.send_buffers, bool):
            raise InvalidOption(f"send_buffers is {self.send_buffers!r}; give True or False.")
