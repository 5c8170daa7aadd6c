"""Choosing submodules by their classes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from shard_core.errors import InvalidOption, nearest


def has_forward(kind: type[nn.Module]) -> bool:
    """Return whether modules of a class run; of a list of modules nobody knows when its parameters are needed.

    Args:
        kind: The class.

    Example:
        >>> has_forward(nn.Linear), has_forward(nn.ModuleList)
        (True, False)
    """
    return kind.forward is not nn.Module.forward


def of_classes(
    option: str, classes: Iterable[type[nn.Module]], module: nn.Module, *, running: bool = True
) -> list[nn.Module]:
    """Find the submodules of some classes.

    Args:
        option: What the classes were given for, for the message.
        classes: Classes, each of which must match.
        module: The whole module.
        running: Whether they must have a forward.

    Returns:
        The submodules, each once, outer ones first.

    Raises:
        InvalidOption: If a class matches no submodule, or has no forward.
    """
    parts = [part for part in module.modules() if part is not module]
    for kind in classes:
        if not any(isinstance(part, kind) for part in parts):
            hint = nearest(kind.__name__, {type(part).__name__ for part in parts})
            raise InvalidOption(f"{option} names {kind.__name__}, of which the model has none{hint or '.'}")
        if running and not has_forward(kind):
            raise InvalidOption(
                f"{option} names {kind.__name__}, which has no forward; name the class of what it holds."
            )
    return [part for part in parts if isinstance(part, tuple(classes))]
