"""The options of ``zero1``."""

from __future__ import annotations

import dataclasses

from shard_core import InvalidOption
from shard_core.plugins import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zero1Config:
    """Options of ``zero1``."""

    find_unused_parameters: bool = option(False, "look for parameters a loss does not reach, at each backward")

    def __post_init__(self) -> None:
        if not isinstance(self.find_unused_parameters, bool):
            raise InvalidOption(f"find_unused_parameters is {self.find_unused_parameters!r}; give True or False.")
