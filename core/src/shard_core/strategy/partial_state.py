"""State dicts of a module of which a rank holds parts that nobody but the engine can read."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from shard_core.errors import SetupError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


class PartialStateDict:
    """Refuses ``state_dict`` where it would hold parts, or nothing, in place of a parameter's values.

    A DTensor is a part as well, but one that tells so itself.

    Args:
        module: The user's, before setup has changed it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._shapes = {part: _shapes(part) for part in module.modules()}
        self._handles: list[RemovableHandle] = []

    def install(self, strategy: str) -> None:
        """Watch those parts of the module whose parameters have lost their shapes.

        Args:
            strategy: The strategy's name, for the message.
        """
        for part, shapes in self._shapes.items():
            if _changed(part, shapes) is not None:
                check = functools.partial(_check, strategy, shapes)
                self._handles.append(part.register_state_dict_pre_hook(check))

    def remove(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()


def _check(
    strategy: str, shapes: dict[str, tuple[int, ...]], module: torch.nn.Module, prefix: str, keep_vars: bool
) -> None:
    # Who asks for the parameters themselves wants to know which there are; engines do.
    changed = None if keep_vars else _changed(module, shapes)
    if changed is not None:
        raise SetupError(
            f"state_dict() would give {prefix + changed!r} as this rank holds it under strategy {strategy!r}, in the "
            f"shape {_shapes(module)[changed]} and not {shapes[changed]}; let every rank call "
            "strategy.module_state_dict(model), which gives rank 0 whole tensors, or strategy.save_checkpoint()."
        )


def _changed(part: torch.nn.Module, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Name a parameter whose shape is another now, which it need not be while an engine shows it whole."""
    now = _shapes(part)
    return next((name for name, shape in shapes.items() if now.get(name, shape) != shape), None)


def _shapes(part: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    own: dict[str, Any] = dict(part.named_parameters(recurse=False, remove_duplicate=False))
    return {name: tuple(each.shape) for name, each in own.items() if not isinstance(each, DTensor)}
