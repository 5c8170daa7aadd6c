"""Shards by name: ``parameters()`` lists them at any time, and ``load_state_dict`` fills them from full tensors."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shard_core.fully_shard.entry_methods import reshard
from shard_core.parameters import laid_out_like, plain_name

if TYPE_CHECKING:
    from shard_core.fully_shard.entry_methods import EntryMethods


def list_shards(module: torch.nn.Module, calls: EntryMethods) -> None:
    """Have ``parameters()`` and what is built on it, such as ``zero_grad``, reach the shards at any time.

    After a forward the root keeps its parameters gathered for the backward. What is listed then, to be zeroed or
    changed by hand, would be copies that are freed after it, and the change would be lost. What is gathered stays so,
    since a method may be running that reads it; the next call gathers it anew.

    Args:
        module: One that was sharded, and shows its shards.
        calls: What gathers units around its calls.
    """
    shards = {
        (part, name): parameter
        for part in module.modules()
        for name, parameter in _own(part)
        if isinstance(parameter, DTensor)
    }

    def shards_of(part: torch.nn.Module) -> dict[torch.Tensor, torch.nn.Parameter]:
        return {
            shown: shards[each, name] for each in part.modules() for name, shown in _own(each) if (each, name) in shards
        }

    @functools.wraps(torch.nn.Module.named_parameters)
    def named_parameters(part: torch.nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        listed = type(part).named_parameters(part, *args, **kwargs)
        if torch.compiler.is_compiling():
            return listed
        calls.end_abandoned()
        if calls.running:
            return listed
        calls.gather_anew()
        instead = shards_of(part)
        return ((name, instead.get(each, each)) for name, each in listed)

    for part in module.modules():
        # A bound method, as torch's compiler expects of those that users have replaced.
        vars(part)[named_parameters.__name__] = types.MethodType(named_parameters, part)


def shard_full_tensors(
    root: weakref.ref[torch.nn.Module],
    module: torch.nn.Module,
    state_dict: dict[str, torch.Tensor],
    prefix: str,
    metadata: dict[str, Any],
    *others: object,
) -> None:
    """Shard full tensors that ``load_state_dict`` is given, which torch would not mix with shards.

    With ``assign=True`` they are copied, too: what is assigned in a shard's place, the unit would never see.
    """
    del others
    metadata.pop("assign_to_params_buffers", None)
    whole = root()
    if whole is not None:
        reshard(whole)
    for name, parameter in module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        key = plain_name(name)
        if key in state_dict:
            state_dict[key] = laid_out_like(parameter, state_dict[key])


def _own(part: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return torch.nn.Module.named_parameters(part, recurse=False, remove_duplicate=False)
