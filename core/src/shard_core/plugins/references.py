"""Importing what a backend's metadata and visiting card refer to, and naming the backend when that fails."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shard_core.errors import BrokenBackend, ShardError, nearest

if TYPE_CHECKING:
    from types import ModuleType


def load_object(reference: str, distribution: str) -> Any:
    """Import what a reference names.

    Args:
        reference: ``"package.module:name"``.
        distribution: Who gave the reference, for the message.

    Returns:
        The object.

    Raises:
        BrokenBackend: If the module cannot be imported or has no such name.
        ShardError: Whatever the module itself raises on purpose.

    Example:
        >>> load_object("shard_core.capability:Capability", "shard-core").__name__
        'Capability'
        >>> load_object("shard_core.capability:Capabilities", "shard-core")
        Traceback (most recent call last):
        ...
        shard_core.errors.BrokenBackend: shard-core refers to 'shard_core.capability:Capabilities', but \
that module has no such name; did you mean 'Capability'? Upgrade or uninstall shard-core.
    """
    place, colon, name = reference.partition(":")
    if not (place and colon and name):
        raise BrokenBackend(
            f"{distribution} refers to {reference!r}, which is not of the form 'package.module:name'; upgrade or "
            f"uninstall {distribution}."
        )
    module = load_module(place, distribution)
    try:
        return getattr(module, name)
    except AttributeError as error:
        hint = nearest(name, [each for each in dir(module) if not each.startswith("_")])
        raise BrokenBackend(
            f"{distribution} refers to {reference!r}, but that module has no such name{hint or '.'} Upgrade or "
            f"uninstall {distribution}."
        ) from error


def load_module(name: str, distribution: str) -> ModuleType:
    """Import a backend's module.

    Args:
        name: The module's full name.
        distribution: Whose it is, for the message.

    Returns:
        The module.

    Raises:
        BrokenBackend: If it cannot be imported, with what went wrong.
        ShardError: Whatever the module itself raises on purpose.
    """
    try:
        return importlib.import_module(name)
    except ShardError:
        raise
    except Exception as error:
        raise BrokenBackend(
            f"{distribution} is installed, but its module {name!r} cannot be imported ({cause(error)}); "
            f"repair or uninstall {distribution}."
        ) from error


def cause(error: Exception) -> str:
    """Format an exception as half a sentence.

    Example:
        >>> cause(ValueError("two and two make five."))
        'ValueError: two and two make five'
    """
    return f"{type(error).__name__}: {str(error).rstrip('.')}"
