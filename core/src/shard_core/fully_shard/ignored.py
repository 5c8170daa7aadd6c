"""Which parameters users want to stay whole on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from shard_core.errors import InvalidOption, nearest
from shard_core.parameters import plain_module_name, plain_name
from shard_core.preparation.submodules import of_classes

T = TypeVar("T")


def ignored_parameters(
    module: nn.Module,
    modules: Iterable[nn.Module | type[nn.Module] | str],
    states: Iterable[nn.Parameter | nn.Module | str],
) -> set[nn.Parameter]:
    """Find the parameters that are not to be sharded.

    Args:
        module: The whole module.
        modules: Submodules all of whose parameters stay whole: themselves, their classes, or their names, ``*`` for
            any one part of a name.
        states: Parameters themselves or their names; or submodules.

    Raises:
        InvalidOption: If something is no part of the module, or nothing is left to shard.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> sorted(tuple(p.shape) for p in ignored_parameters(model, [nn.LayerNorm], ["*.weight"]))
        [(3,), (3,), (3, 2)]
    """
    parts = [(plain_module_name(name), part) for name, part in module.named_modules(remove_duplicate=False) if name]
    parameters = [(plain_name(name), p) for name, p in module.named_parameters(remove_duplicate=False)]
    found: list[nn.Parameter] = []
    for asked in modules:
        found += [parameter for part in _modules(asked, module, parts) for parameter in part.parameters()]
    for state in states:
        if isinstance(state, nn.Module):
            found += [parameter for part in _one(state, "ignored_states", parts) for parameter in part.parameters()]
        elif isinstance(state, str):
            found += _named(state, "ignored_states", parameters)
        else:
            found += _one(state, "ignored_states", parameters)
    if found and set(found) == set(module.parameters()):
        raise InvalidOption(
            "ignored_modules and ignored_states leave no parameter to shard; name fewer, or choose strategy 'ddp'."
        )
    return set(found)


def _modules(asked: Any, module: nn.Module, parts: Sequence[tuple[str, nn.Module]]) -> list[nn.Module]:
    if isinstance(asked, type):
        return of_classes("ignored_modules", [asked], module, running=False)
    if isinstance(asked, str):
        return _named(asked, "ignored_modules", parts)
    return _one(asked, "ignored_modules", parts)


def _named(pattern: str, option: str, known: Sequence[tuple[str, T]]) -> list[T]:
    wanted = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
    found = [thing for name, thing in known if wanted.fullmatch(name)]
    if not found:
        close = nearest(pattern, [name for name, _ in known])
        raise InvalidOption(f"{option} names {pattern!r}, which the model does not have{close or '.'}")
    return found


def _one(thing: T, option: str, known: Sequence[tuple[str, T]]) -> list[T]:
    if not any(each is thing for _, each in known):
        raise InvalidOption(
            f"{option} holds a {type(thing).__name__} that is no part of the model; processes that were launched have "
            "copies of the model, so give its name."
        )
    return [thing]
