"""What ``parameters()`` lists while a forward runs: values that stage 3 has gathered, which a penalty is made from."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator

import torch
from torch import nn

from shard_deepspeed import _versions


def gather_listed(root: nn.Module) -> None:
    """Have ``parameters()`` and ``named_parameters()``, inside a forward, gather what they list.

    DeepSpeed gathers a parameter that a forward reads by its name, until the layer it belongs to has run, and what
    lists parameters never asks by name: they would have no values, so that a penalty, or a norm of an evaluation, would
    be zero without a word.

    Args:
        root: A module that stage 3 has sharded.
    """

    def gather(part: nn.Module, recurse: bool) -> None:
        if not torch.compiler.is_compiling():
            for name, _ in type(part).named_parameters(part, recurse=recurse):
                _versions.gather_in_forward(root, part.get_parameter(name))

    @functools.wraps(nn.Module.named_parameters)
    def named_parameters(
        part: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        if recurse:  # else it is DeepSpeed that asks, to gather or to let go
            gather(part, recurse)
        return type(part).named_parameters(part, prefix, recurse, remove_duplicate)

    @functools.wraps(nn.Module.parameters)
    def parameters(part: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
        gather(part, recurse)
        return type(part).parameters(part, recurse)

    for part in root.modules():
        for method in (named_parameters, parameters):
            vars(part)[method.__name__] = types.MethodType(method, part)


def list_plainly(root: nn.Module) -> None:
    """Undo ``gather_listed``."""
    for part in root.modules():
        for name in ("named_parameters", "parameters"):
            vars(part).pop(name, None)
