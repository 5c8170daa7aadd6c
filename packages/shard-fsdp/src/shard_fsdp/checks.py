"""What the values of options may be, told without torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shard_core.errors import InvalidOption


def policy(name: str, value: Any) -> None:
    """Check what chooses submodules: classes, a function, or one of torch's policies.

    Args:
        name: The option.
        value: What the user gave.

    Raises:
        InvalidOption: If it is none of these.
    """
    if value is None or _is_policy(value):
        return
    if isinstance(value, Collection) and not isinstance(value, str) and value:
        for kind in value:
            if not isinstance(kind, type):
                raise InvalidOption(
                    f"{name} names {kind!r:.60}; name classes of modules, such as nn.TransformerEncoderLayer."
                )
        return
    raise InvalidOption(
        f"{name} is {value!r:.60}; give a set of classes, a policy of torch.distributed.fsdp.wrap, or a function of "
        "module, recurse and nonwrapped_numel."
    )


def _is_policy(value: Any) -> bool:
    # Torch's CustomPolicy cannot be called; asking for its class would import torch.
    return not isinstance(value, type) and (callable(value) or type(value).__name__ == "CustomPolicy")
