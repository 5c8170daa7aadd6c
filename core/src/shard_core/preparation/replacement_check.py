"""Where a module's parameters stood at setup, and whether they stand there still."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from shard_core.errors import SetupError
from shard_core.parameters import plain_module_name, plain_name


class _Held(NamedTuple):
    name: str
    parameter: nn.Parameter
    dtype: torch.dtype
    shape: tuple[int, ...]


class ReplacementCheck:
    """Where the parameters of a module stand: engines that put others there for a while would undo what users do.

    Args:
        module: Any module; places that are made later are minded by ``check_held`` alone.
        shape_of: Returns the whole shape of a parameter, of which there may be no element in the module; None where
            parameters are always whole.
    """

    def __init__(self, module: nn.Module, shape_of: Callable[[torch.Tensor], Sequence[int]] | None = None) -> None:
        self._module, self._may_be_away = module, shape_of is not None
        self._inside = [(part, _inside(part)) for part in module.modules()]
        self._places: list[tuple[nn.Module, str, list[_Held]]] = []
        for prefix, part in module.named_modules():
            held = [
                _Held(name, each, each.dtype, tuple(shape_of(each) if shape_of else each.shape))
                for name, each in _own(part)
            ]
            if held:
                self._places.append((part, plain_module_name(prefix), held))

    def check(self, stands_for: Callable[[], Mapping[torch.Tensor, torch.Tensor]] = dict) -> None:
        """Check that no other parameter was put in one's place, for good or for one call, nor given another dtype.

        Every forward calls it: a part that holds parameters takes some three microseconds, others none.

        Args:
            stands_for: Returns which tensor, put there by the engine, stands for which parameter.

        Raises:
            SetupError: Naming the first that was replaced.
        """
        stand_ins: Mapping[torch.Tensor, torch.Tensor] | None = None
        for part, prefix, held in self._places:
            now = dict(_own(part))
            for name, parameter, dtype, _ in held:
                found = now.get(name)
                if found is parameter:
                    _check_dtype(parameter, dtype, prefix, name)
                    continue
                stand_ins = stands_for() if stand_ins is None else stand_ins
                if found is None or stand_ins.get(found) is not parameter:
                    raise SetupError(
                        f"{_joined(prefix, name)!r} is not the parameter that setup has left there, and this strategy "
                        "would put that back in forward: change its values under torch.no_grad(); tie, prune, resize "
                        "and reparametrize before setup, and leave torch.func.functional_call to 'ddp'."
                    )

    def check_dtypes(self) -> None:
        """Check that nothing that is trained was given another dtype; every backward calls it.

        Raises:
            SetupError: Naming the first that was.
        """
        for _, prefix, held in self._places:
            for name, parameter, dtype, _ in held:
                if parameter.requires_grad:
                    _check_dtype(parameter, dtype, prefix, name)

    def check_shapes(self) -> None:
        """Check that nothing that the engine has sharded or trains was given data of another shape.

        Raises:
            SetupError: Naming the first that was.
        """
        for _, prefix, held in self._places:
            for name, parameter, _, shape in held:
                if parameter.shape != shape and (parameter.numel() if self._may_be_away else parameter.requires_grad):
                    raise _replaced(_joined(prefix, name), parameter.shape, shape)

    def check_held(self, *, alone: bool = False, new_parts: bool = True) -> None:
        """Check that no other parameter was put in the place of one that is trained, or of the part that holds it.

        Every backward calls it: a part takes half a microsecond while there are the same parameters and parts inside.

        Args:
            alone: Whether the engine cannot do with parameters that are added.
            new_parts: Whether those count that are added with the part of the module that holds them.

        Raises:
            SetupError: Naming the first that was.
        """
        if any(_inside(part) != inside for part, inside in self._inside):
            self._check_structure(alone, new_parts)

    def _check_structure(self, alone: bool, new_parts: bool) -> None:
        before = {_joined(prefix, each.name): each for _, prefix, held in self._places for each in held}
        known = {id(each.parameter) for each in before.values()}
        parts = {part for part, _ in self._inside}
        present = {id(each) for each in nn.Module.parameters(self._module)}
        for prefix, part in self._module.named_modules():
            for own, parameter in _own(part):
                if id(parameter) in known:
                    continue
                name = plain_name(_joined(prefix, own))
                was = before.get(name)
                trained = was is not None and was.parameter.requires_grad and parameter.requires_grad
                if was is not None and trained and id(was.parameter) not in present:
                    raise _replaced(name, parameter.shape, was.shape)
                if alone and (new_parts or part in parts):
                    raise SetupError(
                        f"{name!r} was put into the module after setup, and this strategy gathers and lets go of what "
                        "it has sharded alone; add layers and adapters before setup, or end this strategy and set the "
                        "module up with another one."
                    )


def _replaced(name: str, now: Sequence[int], before: Sequence[int]) -> SetupError:
    what = f"has the shape {tuple(now)} and had {tuple(before)} at setup"
    if tuple(now) == tuple(before):
        what = "is another parameter than setup has left there"
    return SetupError(
        f"{name!r} {what}, and no gradient of it would reach an optimizer, averaged over ranks; resize and exchange "
        "parameters before setup, or end this strategy and set the module up with another one."
    )


def _check_dtype(parameter: torch.Tensor, dtype: torch.dtype, prefix: str, name: str) -> None:
    if parameter.dtype != dtype:
        raise SetupError(
            f"{_joined(prefix, name)!r} is {parameter.dtype} and was {dtype} at setup, for which this strategy has "
            "made its messages; cast it back, or cast the module before setup, with a precision= of that name."
        )


def _own(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return nn.Module.named_parameters(part, recurse=False, remove_duplicate=False)


def _inside(part: nn.Module) -> list[int]:
    """List what stands in a part, by identity: what is compared may have an ``__eq__`` of its own."""
    return [*map(id, part._parameters.values()), *map(id, part._modules.values())]


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}".removeprefix(".")
