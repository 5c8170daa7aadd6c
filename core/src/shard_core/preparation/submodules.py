"""Choosing submodules: by their classes, by a function, or because they repeat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from shard_core.errors import InvalidOption, nearest
from shard_core.parameters import plain_module_name


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


def chosen_layers(option: str, layers: Any, module: nn.Module) -> list[nn.Module]:
    """Find the submodules that an option means.

    Args:
        option: What they were given for, for the message.
        layers: A class, classes, or a function that decides for each submodule that has a forward.
        module: The whole module.

    Returns:
        The submodules, each once, outer ones first.

    Raises:
        InvalidOption: If a class matches no submodule or has no forward, or the function chooses none.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> chosen_layers("activation_checkpointing", nn.Linear, model)
        [Linear(in_features=2, out_features=2, bias=True)]
        >>> chosen_layers("activation_checkpointing", lambda part: part.training and hasattr(part, "heads"), model)
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: activation_checkpointing is a function that chooses none of the 2 submodules \
of Sequential; let it return True for some of: Linear, ReLU.
    """
    if isinstance(layers, type):
        layers = [layers]
    if isinstance(layers, Iterable):
        return of_classes(option, layers, module)
    return _by_function(option, layers, module)


def _by_function(option: str, function: Callable[[nn.Module], object], module: nn.Module) -> list[nn.Module]:
    parts = [part for part in module.modules() if part is not module and has_forward(type(part))]
    found = [part for part in parts if function(part)]
    if not found:
        kinds = ", ".join(sorted({type(part).__name__ for part in parts})) or "it has none"
        raise InvalidOption(
            f"{option} is a function that chooses none of the {len(parts)} submodules of {type(module).__name__}; let "
            f"it return True for some of: {kinds}."
        )
    return found


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """List a module's repeated blocks: the outermost runs of siblings of one class.

    Args:
        module: The whole module.

    Example:
        >>> find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.Bilinear(1, 1, 1)))
        [Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=2, bias=True)]
    """
    return list(dict.fromkeys(block for run in runs_of_blocks(module) for _, block in run))


def runs_of_blocks(module: nn.Module, prefix: str = "") -> Iterator[list[tuple[str, nn.Module]]]:
    """Yield, outermost first, the siblings of one class that repeat, with their names.

    Args:
        module: The whole module.
        prefix: What its own name adds to theirs.
    """
    children = [(f"{prefix}{name}", child) for name, child in module.named_children() if num_bytes(child)]
    # Containers without a forward of their own cannot be a unit; what they hold can.
    classes = [type(child) for _, child in children if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
    repeated = {kind for kind in classes if classes.count(kind) > 1}
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and repeated:
        yield [(plain_module_name(name), child) for name, child in children if type(child) in repeated]
        children = [(name, child) for name, child in children if type(child) not in repeated]
    for name, child in children:
        yield from runs_of_blocks(child, f"{name}.")


def num_bytes(*modules: nn.Module) -> int:
    """Add up the size of the parameters of some modules, each counted once.

    Args:
        modules: Modules that may share parameters.

    Returns:
        Bytes.
    """
    parameters = {id(p): p for module in modules for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in parameters.values())
