"""State dicts of a module whose parameters an engine has emptied: their values are nowhere in it."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from shard_core.errors import SetupError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


class PartialStateDict:
    """Refuses ``state_dict`` where it would hold nothing in place of a parameter's values.

    Parts pass, DTensors or flat ones: loaded into the same module, they restore what was there.

    Args:
        module: The user's, before setup has changed it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._shapes = {part: _shapes(part) for part in module.modules()}
        self._handles: list[RemovableHandle] = []

    def install(self, strategy: str) -> None:
        """Watch those parts of the module whose parameters have been emptied.

        Args:
            strategy: The strategy's name, for the message.
        """
        for part, shapes in self._shapes.items():
            if _emptied(part, shapes) is not None:
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
    emptied = None if keep_vars else _emptied(module, shapes)
    if emptied is not None:
        raise SetupError(
            f"state_dict() would give {prefix + emptied!r} as this rank holds it under strategy {strategy!r}, in the "
            f"shape {_shapes(module)[emptied]} and not {shapes[emptied]}; let every rank call "
            "strategy.module_state_dict(model), which gives rank 0 whole tensors, or strategy.save_checkpoint()."
        )


def _emptied(part: torch.nn.Module, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """Name a parameter that has no elements now, which it need not lack while an engine shows it whole."""
    now = _shapes(part)
    had = (name for name, shape in shapes.items() if math.prod(shape))
    return next((name for name in had if not math.prod(now.get(name, shapes[name]))), None)


def _shapes(part: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    own: dict[str, Any] = dict(part.named_parameters(recurse=False, remove_duplicate=False))
    return {name: tuple(each.shape) for name, each in own.items() if not isinstance(each, DTensor)}
