"""Hooks on the gradients of parameters, which do not follow them to a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.errors import SetupError
from shard_xla._versions import hooks_of

if TYPE_CHECKING:
    from shard_core.parameters import ParameterNames


def refuse_hooks(strategy: str, names: ParameterNames) -> None:
    """Refuse parameters with hooks: setup makes others of them, and the hooks would run no more.

    Args:
        strategy: The strategy's name, for the message.
        names: The parameters as they are before setup.

    Raises:
        SetupError: Naming the first parameter with a hook.
    """
    for parameter in names.parameters():
        if hooks_of(parameter):
            raise SetupError(
                f"parameter {names.of(parameter)!r} has a hook on its gradient, which would never run: strategy "
                f"{strategy!r} makes other parameters of a module's; leave the hook out, and change gradients "
                "between backward() and optimizer_step()."
            )
