"""Names of torch and torch_xla without a promise that this distribution leans on, and when they can go.

``torch_xla._XLAC._xla_runtime_is_initialized``: whether the process uses XLA's devices already, so that their number
and kind are settled. Checked on torch_xla 2.9.0. It can go when ``torch_xla.runtime`` exposes it.

``XlaFullyShardedDataParallel.all_gather_op``, ``all_reduce_op``, ``reduce_scatter_op`` (a callable with ``flush`` and
``scale``) and ``coalesce_all_gather_ops``: attributes of an instance that its constructor sets and its forwards and
backwards read; collectives over the host take their place. Checked on torch_xla 2.9.0. They can go when the
constructor takes collectives.

``XlaFullyShardedDataParallel._shard_param_on_dim_0``: whether a unit is split by rows; what is gathered together has to
be. Checked on torch_xla 2.9.0. It can go when ``coalesce_all_gather_ops`` works for what is split by elements.

``XlaFullyShardedDataParallel._rebuild_full_params``, which ``strategy/unit.py`` overrides: it goes through
``_replace_xla_tensor``, after which ``detach`` takes the strides of before, until somebody has asked for the shape.
Checked on torch_xla 2.9.0. It can go when ``detach`` asks for it.

``XlaFullyShardedDataParallel._flatten_and_pad_to_world_size`` and ``_get_shard``, which ``strategy/unit.py`` overrides
as well as ``_rebuild_full_params`` and ``_post_backward_hook``, ``_orig_size`` of shards, ``_sharded_param`` of each of
``full_params``, and ``torch_xla._XLAC._replace_xla_tensor``: a parameter without dims cannot be split by rows
otherwise. Checked on torch_xla 2.9.0. They can go when upstream takes it to be one row.

``XlaFullyShardedDataParallel._register_pre_backward_hooks``, which ``strategy/unit.py`` overrides: tensors in objects
that a forward returns would lead no backward to its unit. Checked on torch_xla 2.9.0. It can go when upstream looks
there.

``XlaFullyShardedDataParallel._output_pre_backward_hook_registered``: the identities of tensors that units have
returned, living or not, through which no backward leads to the units around them. Checked on torch_xla 2.9.0. It can go
when every output leads to the unit that returns it.

``XlaFullyShardedDataParallel._wait_for_post_backward``, which ``strategy/unit.py`` overrides, and ``training_state``: a
unit of whose own parameters a loss has reached none, as a root whose layers are units, or all were frozen after the
forward, would end in a ValueError. Checked on torch_xla 2.9.0. It can go when such a unit's backward ends.

``torch.nn.Module._call_impl`` and ``_compiled_call_impl``: what a call of a module runs, and what it runs instead if
that is there. Checked on torch 2.9.0. They can go when a module's call can be exchanged in public.

``XlaFullyShardedDataParallel.full_param_infos``, ``shared_full_param_infos`` and ``sharded_params``: which parameter of
which submodule each shard is of. ``get_original_names_and_sharded_parameters`` should do, but lists the root's shards
for every unit. Checked on torch_xla 2.9.0. They can go when it is right.

``XlaFullyShardedDataParallel.full_params`` and ``_has_full_param`` of each: which of a unit's parameters its next
forward will gather, one call after another; over the host they share a message. Checked on torch_xla 2.9.0. They can
go when ``coalesce_all_gather_ops`` works for parameters that are split by elements.

``XlaFullyShardedDataParallel._free_full_params``: forgets whole parameters. Upstream keeps them after a forward that no
backward followed, and for a parameter that a loss did not reach: the next forward would compute with what they were
before the shards changed. Checked on torch_xla 2.9.0. It can go when a change is noticed.

``XlaFullyShardedDataParallel._register_post_backward_hooks``, ``_rebuild_full_params`` and ``reshard_after_forward``,
and ``_shard_bwd_hook`` of each of ``full_params``: what a unit does in a forward for the one backward that follows. A
further backward through it needs it again. Checked on torch_xla 2.9.0. They can go when a graph may be run backward
twice, and in any order with others.

``XlaFullyShardedDataParallel._fsdp_wrapped_module`` and ``SpmdFullyShardedDataParallel._orig_module``: parts of names
in the state dict of a module with units. Checked on torch_xla 2.9.0. They can go when it has the module's own names.

``XlaFullyShardedDataParallel._post_backward_hook``: sends a parameter's gradient. Upstream calls it for what a backward
has reached, and what earlier ones have left on the rank waits for good if the last does not reach it. Checked on
torch_xla 2.9.0. It can go when the end of ``no_sync`` sends all gradients.

``torch.Tensor._version``, ``_backward_hooks`` and ``_post_accumulate_grad_hooks``: whether a tensor was changed in
place, and how many hooks it has. Checked on torch 2.9.0. They can go when there are public names for them.

``torch._C._current_graph_task_id``: whether autograd runs just now; activation checkpointing calls layers again from
there. Checked on torch 2.9.0. It can go when torch shows it in public.

``torch._register_device_module``: registers what torch is to find as ``torch.xla``; without it
``torch.utils.checkpoint`` fails on the device. Checked on torch 2.9.0. It can go when torch_xla registers its own.

``torch.nn.Module._parameters``: a shard stands there under its parameter's name, while the attribute of that name is
the whole parameter, so that modules keep their own names. Checked on torch 2.9.0. It can go when the wrapper
registers shards where parameters were.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def runtime_is_started() -> bool:
    """Return whether XLA's devices are in use in this process."""
    import torch_xla

    return bool(torch_xla._XLAC._xla_runtime_is_initialized())


def inside_backward() -> bool:
    """Return whether autograd is running a backward in this thread."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def register_device_module(module: types.ModuleType) -> None:
    """Register what torch is to find as ``torch.xla``, unless there is such a module."""
    import torch

    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", module)


def take_over_collectives(unit: Any, *, all_gather: Any, all_reduce: Any, reduce_scatter: Any, coalesce: bool) -> None:
    """Replace XLA's own functions through which a unit communicates.

    Args:
        unit: An ``XlaFullyShardedDataParallel``.
        all_gather: ``(tensor or list, groups=...)`` to what all ranks' parts are, joined along the first dim.
        all_reduce: ``(kind, tensor, groups=...)`` to a new tensor.
        reduce_scatter: ``(tensor, done)`` with ``flush()`` and ``scale``.
        coalesce: Whether a unit's parameters are gathered by one call, if it is split by rows.
    """
    unit.all_gather_op = all_gather
    unit.all_reduce_op = all_reduce
    unit.reduce_scatter_op = reduce_scatter
    # Upstream's automatic wrapping does not hand it on to the units inside.
    unit.coalesce_all_gather_ops = coalesce and unit._shard_param_on_dim_0


def exchange_call(module: torch.nn.Module, call: Callable[..., Any]) -> None:
    """Make a call of a module another function's; copies of the module do not have it."""
    module._compiled_call_impl = call


def plain_call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module as if nothing had been exchanged."""
    return module._call_impl(*args, **kwargs)


def shards_of(unit: Any) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """List a unit's shards: the submodule and the attribute of the whole parameter, and the shard; tied ones again."""
    shards = {}
    for (_, owner, name), shard in zip(unit.full_param_infos, unit.sharded_params, strict=True):
        shards[id(owner), name] = shard
        yield owner, name, shard
    for _, _, owner, name, first_owner, first_name in unit.shared_full_param_infos:
        yield owner, name, shards[id(first_owner), first_name]


def shards_to_gather(unit: Any) -> list[torch.nn.Parameter]:
    """List the shards that a unit will gather next, in its order."""
    pairs = zip(unit.full_params, unit.sharded_params, strict=True)
    return [shard for whole, shard in pairs if not whole._has_full_param]


def register_in_place(unit: Any) -> None:
    """Register a unit's shards under their parameters' own names instead of on the unit."""
    for name, _ in list(unit.named_parameters(recurse=False)):
        delattr(unit, name)
    for owner, name, shard in shards_of(unit):
        owner._parameters[name] = shard


def full_and_shards(unit: Any) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
    """List a unit's whole parameters, which compute, each with its shard."""
    return zip(unit.full_params, unit.sharded_params, strict=True)


def prepare_backward(unit: Any) -> None:
    """Prepare a unit to gather and reduce in a backward through any forward, whatever came after that forward."""
    import torch

    if not any(hasattr(whole, "_shard_bwd_hook") for whole in unit.full_params):
        with torch.enable_grad():  # a backward runs without
            unit._register_post_backward_hooks()
    if not unit.reshard_after_forward:  # the others gather of themselves
        gather(unit)


def gather(unit: Any) -> None:
    """Gather what a unit has freed, for a backward."""
    unit._rebuild_full_params(apply_opt_barrier=unit.optimization_barrier_in_backward)


def without_wrappers(key: str) -> str:
    """Remove the names of wrappers from a name in a state dict."""
    return key.replace("_fsdp_wrapped_module.", "").replace("_orig_module.", "")


def changes_of(tensor: torch.Tensor) -> int:
    """Count the changes in place of a tensor, but not those through its ``data``."""
    return tensor._version


def hooks_of(tensor: torch.Tensor) -> int:
    """Count the hooks on a tensor's gradient."""
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def replace_value(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Make a tensor's value another one, perhaps of another shape, unseen by autograd, as upstream does."""
    import torch
    import torch_xla

    with torch.autograd._unsafe_preserve_version_counter(tensor):
        torch_xla._XLAC._replace_xla_tensor(tensor, value)


def send_gradients(unit: Any, wholes: Sequence[torch.Tensor]) -> None:
    """Send gradients of a unit that wait on their rank, after a backward; every rank calls this with the same."""
    from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import TrainingState

    before, unit.training_state = unit.training_state, TrainingState.BACKWARD_POST
    for whole in wholes:
        unit._post_backward_hook(whole)
    unit.reduce_scatter_op.flush()
    unit.training_state = before


def end_backward(root: Any) -> None:
    """Have the units of a module be as they are after a backward, if one has begun and not ended."""
    if root.training_state.name != "IDLE":
        root._wait_for_post_backward()


def is_whole(tensor: Any) -> bool:
    """Return whether a unit has gathered one of its whole parameters, and not freed it since."""
    whole: bool = tensor._has_full_param
    return whole


def part_of(unit: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return what a unit's shard on this rank is of a whole parameter."""
    part: torch.Tensor = unit._get_shard(whole)
    return part


def forget_full_parameters(unit: Any) -> None:
    """Make the next forward gather a unit's parameters anew."""
    if any(whole._has_full_param for whole in unit.full_params):
        unit._free_full_params(apply_opt_barrier=unit.optimization_barrier_in_forward)
