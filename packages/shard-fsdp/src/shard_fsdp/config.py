"""The options of the strategies of this package."""

from __future__ import annotations

import dataclasses

from shard_core.errors import InvalidOption
from shard_core.options import option
from shard_fsdp.preparation_config import PreparationOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPConfig(PreparationOptions):
    """Options of ``fsdp``.

    Raises:
        InvalidOption: If a value has the wrong type or makes no sense.
    """

    unit_bytes: int = option(
        64 * 2**20, "neighbouring blocks share one message until it carries this many bytes of parameters"
    )
    reshard_after_forward: bool | None = option(
        None, "free whole parameters between forward and backward; None does so for all but the root's"
    )

    def __post_init__(self) -> None:
        """Check types and values."""
        super().__post_init__()
        if isinstance(self.unit_bytes, bool) or not isinstance(self.unit_bytes, int) or self.unit_bytes < 1:
            raise InvalidOption(f"unit_bytes is {self.unit_bytes!r}; give a whole number of bytes from 1 up.")
        if self.reshard_after_forward is not None and not isinstance(self.reshard_after_forward, bool):
            raise InvalidOption(f"reshard_after_forward is {self.reshard_after_forward!r}; give True, False or None.")
