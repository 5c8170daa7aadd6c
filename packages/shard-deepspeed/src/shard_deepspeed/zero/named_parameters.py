"""What ``parameters()`` lists while a forward runs: values that stage 3 has gathered, which a penalty is made from."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator

import torch
from torch import nn

from shard_deepspeed import _versions


def gather_listed(root: nn.Module, before: Callable[[], None]) -> None:
    """Gather what ``parameters()`` and ``named_parameters()`` list inside a forward.

    DeepSpeed gathers a parameter that a forward reads by its name, and what lists parameters never asks by name: they
    would have no values, so that a penalty, or a norm of an evaluation, would be zero without a word. Each is gathered
    when it is come to: ``next(module.parameters()).dtype``, as in many models, shall not gather them all.

    Args:
        root: A module that stage 3 has sharded.
        before: What is called before parameters are listed: it ends a forward that nobody was told has ended.
    """

    @functools.wraps(nn.Module.named_parameters)
    def named_parameters(
        part: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        listed = type(part).named_parameters(part, prefix, recurse, remove_duplicate)
        before()
        # Without the parts inside it is DeepSpeed that asks, to gather or to let go.
        return _gathering(root, listed) if recurse else listed

    @functools.wraps(nn.Module.parameters)
    def parameters(part: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        before()
        listed = type(part).named_parameters(part, recurse=recurse)
        return (parameter for _, parameter in _gathering(root, listed))

    for part in root.modules():
        for method in (named_parameters, parameters):
            vars(part)[method.__name__] = types.MethodType(method, part)


def _gathering(root: nn.Module, listed: Iterator[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Gather each parameter, and hold it once the next one is asked for: what stops before has read no values of it."""
    if torch.compiler.is_compiling():
        yield from listed
        return
    for name, parameter in listed:
        _versions.gather_in_forward(root, parameter)
        yield name, parameter
        _versions.hold_in_forward(root, parameter)


def list_plainly(root: nn.Module) -> None:
    """Undo ``gather_listed``."""
    for part in root.modules():
        for name in ("named_parameters", "parameters"):
            vars(part).pop(name, None)
