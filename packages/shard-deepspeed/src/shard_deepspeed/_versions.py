"""What this distribution uses of DeepSpeed beyond its documented API, with the versions it was checked on.

Checked on DeepSpeed 0.19.8 with torch 2.13.0; another minor version is refused by the plugin.

``deepspeed.ops.__compatible_ops__``: which operations can be built. Whoever asks first has a C compiler tried out, and
the first engine on CPU asks, for ``deepspeed_shm_comm``, and has that built where it can be. It can go when DeepSpeed
lets one choose the collectives.

``deepspeed.utils.groups._WORLD_GROUP`` and ``_release_process_group_references``: a clone of the world's process group
outlives the group, and the next engine fails on it. They can go when engines look whether their group still exists.

``Parameter._hp_mapping``, ``params_in_partition``, ``averaged_gradients``, ``update_lp_params``,
``reduce_ready_partitions_and_remove_grads``, ``single_partition_of_fp32_groups`` and
``parallel_partitioned_bit16_groups`` of the optimizer of stages 1 and 2: which run of a parameter's float32
copy is on this rank, its averaged gradient, and bringing stepped values to the parameters. The public
``safe_get_full_*`` gather; the local ones are for stage 3 alone. They can go when those serve stages 1 and 2 too.

``Tensor.view(torch.uint8)`` of every parameter when an engine is made, and parameters without a dimension have no such
view. What is done about it can go when DeepSpeed sends them otherwise.

``module_forward_pre_hook`` and ``module_forward_post_hook`` of an engine, ``FWD_MODULE_STACK``: what ``destroy`` leaves
on a module, and a list that keeps the module alive. ``__params_to_release`` of ``PartitionedParameterCoordinator``: a
cache on the class, which keeps all that a second forward has come through. They can go when ``destroy`` takes care of
these.

``micro_step_id``, ``fp16_groups``, ``fp16_partitioned_groups_flat``, ``fp32_partitioned_groups_flat``,
``_reassign_or_swap_out_partitioned_parameters``, ``checkpoint_event_prologue`` and ``checkpoint_event_epilogue`` of the
optimizer of stage 3: adding gradients up rather than replacing them, and bringing stepped values to the parameters.
``ds_tensor``, ``ds_shape``, ``ds_numel`` and ``ds_status`` of a parameter: its shard, and whether it is whole. They can
go when DeepSpeed exposes a parameter's shard, and takes changed ones, in public.

``ds_inflight_param_registry`` and ``_parameters._in_forward`` of a module, ``ds_id`` and ``ds_external_parameters`` of
a submodule, ``all_gather`` and ``ds_active_sub_modules`` of a parameter, ``FWD_MODULE_STACK``, and
``_forward_epilogue`` of an engine: what is on its way, which submodules need it, and that a forward is over, though by
an exception. They can go when what ``register_external_parameter`` is told in a forward is there until its end.

``applied_pre_backward_ref_cnt`` and ``ds_grads_remaining`` of a submodule: for how many backwards stage 3 gathers it,
and when it lets go; ``pre_sub_module_backward_function``, which gathers it. They can go when a second backward through
a graph, and one from tensors inside objects, find parameters by themselves.

``persistent_parameters`` of the optimizer of stage 3, ``is_external_param`` of a parameter: what is whole between
steps, once it was gathered, and what submodules do not let go of. They can go when that is so from the beginning, and
when parameters without elements are gathered without others.

``parameter_offload``, ``param_numel_persistence_threshold``, ``reduce_and_partition_stream``, ``partition_gradients``,
``clip_grad`` and, by their options' names, further attributes of the optimizers of stages 1 to 3, and three of
``PartitionedParameterCoordinator``: with what they act. The engine's public methods repeat the configuration. They can
go when DeepSpeed exposes what its parts were made with.

``ZERO_SUPPORTED_OPTIMIZERS``: which optimizers are tested. It can go when there is a public list; the function beside
it compiles kernels of Muon.

``ipg_buckets``, ``params_already_reduced``, ``extra_large_param_to_reduce``, ``previous_reduced_grads`` and
``_release_ipg_buffers`` of the optimizers: what a backward that an exception has ended was about to send, and what it
had sent. They can go when DeepSpeed has a call that begins a step anew.

``Tensor._version``, ``_backward_hooks`` and ``_post_accumulate_grad_hooks``: how often a tensor was written to, which
torch's notes on autograd alone document, and whether users have registered hooks on a part, which nothing would call.
They can go when torch lists hooks in public.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from shard_deepspeed.own_device import accelerator, environment


def import_deepspeed(device_type: str) -> Any:
    """Import DeepSpeed for one kind of device, where modules run, without a word."""
    with environment("DS_ACCELERATOR", device_type):
        import deepspeed
    # DeepSpeed calls what torch 2.13 has renamed, at every step.
    renamed = r"`torch\.distributed\.(all_gather_into|reduce_scatter)_tensor` is deprecated"
    warnings.filterwarnings("ignore", category=FutureWarning, message=renamed)
    return deepspeed


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks wait for the gradients of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


@contextlib.contextmanager
def no_compiler(deepspeed: Any) -> Iterator[None]:
    """Mark every operation as one that cannot be built, without trying which can: that compiles as well."""
    names = vars(deepspeed.ops)
    known = names.get("__compatible_ops__")
    names["__compatible_ops__"] = {}
    try:
        yield
    finally:
        del names["__compatible_ops__"]
        if known is not None:
            names["__compatible_ops__"] = known


@contextlib.contextmanager
def quiet(level: int) -> Iterator[None]:
    """Keep DeepSpeed from warning of an optimizer of ours, and leave its logger at the user's level."""
    logger = logging.getLogger("DeepSpeed")
    logger.setLevel(level)

    def worth_saying(record: logging.LogRecord) -> bool:
        return "untested optimizer" not in record.getMessage()

    logger.addFilter(worth_saying)
    try:
        yield
    finally:
        logger.removeFilter(worth_saying)


@contextlib.contextmanager
def one_dimension(parameters: Iterable[Any]) -> Iterator[None]:
    """Add a dimension to parameters without one while an engine is made: DeepSpeed cannot send others."""
    scalars = [parameter for parameter in parameters if parameter.dim() == 0]
    for parameter in scalars:
        parameter.data = parameter.data.reshape(1)
    yield
    for parameter in scalars:
        if hasattr(parameter, "ds_shape"):
            parameter.ds_shape = torch.Size(())
        if parameter.numel():  # else a shard, and the parameter is elsewhere
            parameter.data = parameter.data.reshape(())


def forget_dead_groups() -> None:
    """Remove process groups that DeepSpeed keeps of a world that is gone."""
    from deepspeed.utils import groups

    kept = groups._WORLD_GROUP
    if kept is not None:
        try:
            dist.get_process_group_ranks(kept)
        except KeyError:
            groups._release_process_group_references()


#: What stage 3's coordinator calls options that say what is gathered ahead, and what is kept.
_COORDINATED = {
    "prefetch_bucket_size": "prefetch_bucket_sz",
    "max_live_parameters": "max_n_available_params",
    "max_reuse_distance": "max_reuse_dist_in_numel",
}


def tested_optimizers() -> list[type[torch.optim.Optimizer]]:
    """List the classes that DeepSpeed lists as tested with ZeRO."""
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    return list(ZERO_SUPPORTED_OPTIMIZERS)


def acting_settings(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed's engine's parts act with, by our names; what no part has acts nowhere."""
    zero = engine.optimizer
    if not hasattr(zero, "reduce_bucket_size"):
        clipping, accumulation = engine.gradient_clipping(), engine.gradient_accumulation_steps()
        return {"stage": 0, "gradient clipping": clipping, "gradient accumulation": accumulation}
    acting = {
        "gradient clipping": zero.clip_grad,
        "gradient accumulation": zero.gradient_accumulation_steps,
        **{name: getattr(zero, name) for name in ("contiguous_gradients", "reduce_scatter", "reduce_bucket_size")},
    }
    if not hasattr(zero, "parameter_offload"):
        return acting | {"stage": 2 if zero.partition_gradients else 1, "overlap_comm": zero.overlap_comm}
    ahead = vars(zero.parameter_offload.get_param_coordinator())
    kept_whole = zero.parameter_offload.param_numel_persistence_threshold
    acting |= {"stage": 3, "sub_group_size": zero.sub_group_size, "param_persistence_threshold": kept_whole}
    acting |= {name: ahead[f"_PartitionedParameterCoordinator__{theirs}"] for name, theirs in _COORDINATED.items()}
    stream = zero.reduce_and_partition_stream
    if stream is not None:  # there are no streams on CPUs, where nothing overlaps
        acting["overlap_comm"] = stream != accelerator().default_stream()
    return acting


def stepped_and_own(zero: Any, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the flat tensors that are stepped on this rank and those of the module's own values, pair by pair."""
    if hasattr(zero, "fp16_partitioned_groups_flat"):
        return list(zip(zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True))
    own = [partitions[rank] for partitions in zero.parallel_partitioned_bit16_groups]
    return list(zip(zero.single_partition_of_fp32_groups, own, strict=True))


def step_float32_in_place(zero: Any, rank: int) -> None:
    """Step the module's own values, where these are in float32, and no copy of them."""
    for stepped, own in stepped_and_own(zero, rank):
        if stepped.dtype == own.dtype:
            stepped.data = own.data


def float32_run(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return this rank's run of a parameter's float32 copy at stages 1 and 2, and where it begins."""
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:
        return torch.empty(0, device=parameter.device), 0
    # As it was made it keeps what autograd knew of the parameter's shape then.
    mapping.lp_fragment = mapping.lp_fragment.detach()
    if mapping.lp_fragment.dtype == mapping.hp_fragment.dtype:
        mapping.hp_fragment = mapping.lp_fragment
    return mapping.hp_fragment.data, mapping.lp_fragment_address.start  # counts writes by itself, as no view does


def take_averaged_gradients(zero: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pop what a backward has left on this rank at stages 1 and 2: parameters and the gradients of their runs."""
    parts = zero.averaged_gradients.pop(0)
    return list(zip(zero.params_in_partition[0], parts, strict=False))  # padding comes last


def reduce_late(zero: Any, parameter: torch.Tensor) -> None:
    """Send along a gradient of earlier backwards that the running one did not add to, at stage 1."""
    zero.reduce_ready_partitions_and_remove_grads(parameter, 0)


def forget_backward(zero: Any) -> None:
    """Empty the buckets of a backward that an exception has ended, at stages 1 to 3."""
    for bucket in zero.ipg_buckets.values():
        getattr(bucket, "clear_params", bucket.clear)()  # at stage 3 the other frees buffers
    if hasattr(zero, "extra_large_param_to_reduce"):  # stages 1 and 2
        zero.params_already_reduced = [False] * len(zero.params_already_reduced)
        zero.extra_large_param_to_reduce.clear()
        zero.previous_reduced_grads.clear()
        zero._release_ipg_buffers()


def publish_runs(zero: Any) -> None:
    """Copy the float32 copies' values to all ranks' parameters at stages 1 and 2."""
    zero.update_lp_params()


def float32_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a parameter's float32 copy at stage 3, with its padding."""
    from deepspeed.utils import safe_get_local_fp32_param

    shard: torch.Tensor = safe_get_local_fp32_param(parameter)
    return shard.data  # counts writes by itself, as no view does


def gradient_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory in which gradients of a parameter's shard add up at stage 3, with its padding."""
    from deepspeed.utils import safe_get_local_grad

    shard: torch.Tensor = safe_get_local_grad(parameter)
    return shard


def shard_of(parameter: Any) -> torch.Tensor | None:
    """Return the tensor that holds this rank's shard of a parameter itself at stage 3; None if it is not sharded."""
    shard: torch.Tensor | None = getattr(parameter, "ds_tensor", None)
    return shard


def stored_shard(parameter: Any) -> torch.Tensor | None:
    """Return this rank's shard of a parameter itself at stage 3, with its padding; None if it is not sharded."""
    shard = shard_of(parameter)
    return None if shard is None else shard.data


def is_away(parameter: Any) -> bool:
    """Return whether a parameter's values are partitioned over ranks just now, with none of them in the module."""
    return getattr(getattr(parameter, "ds_status", None), "name", "AVAILABLE") != "AVAILABLE"


def full_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape a parameter has when it is whole, sharded or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def add_up(zero: Any) -> None:
    """Accumulate gradients of shards at stage 3 rather than replace what is there."""
    zero.micro_step_id = 1


@contextlib.contextmanager
def backwards_uncounted(module: torch.nn.Module) -> Iterator[None]:
    """Keep a backward at stage 3 from counting: an engine's submodules are gathered for as many as were forwards."""
    counts = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
    parts = [vars(part) for part in module.modules()]
    before = [{name: part[name] for name in counts if name in part} for part in parts]
    try:
        yield
    finally:
        for part, counted in zip(parts, before, strict=True):
            part.update(counted)


def announce_backward(zero: Any, module: Any, tensor: torch.Tensor) -> None:
    """Have a module's backward at stage 3 begin where one comes to a tensor, as it does at what a forward returns."""

    def begin(gradient: torch.Tensor) -> None:
        del gradient
        if module.applied_pre_backward_ref_cnt > 0:
            module.applied_pre_backward_ref_cnt -= 1
            zero.parameter_offload.pre_sub_module_backward_function(module)

    if tensor.grad_fn is not None:
        module.applied_pre_backward_ref_cnt = getattr(module, "applied_pre_backward_ref_cnt", 0) + 1
        tensor.register_hook(begin)


def gather_persistent(zero: Any) -> None:
    """Gather what is to be whole between uses at stage 3, and keep submodules from letting go of it.

    DeepSpeed gathers it in forwards, lets go of it while it learns the order of submodules, and never gathers a
    parameter without elements by itself, which it wants whole all the same.
    """
    persistent = zero.persistent_parameters
    for parameter in persistent:
        parameter.is_external_param = True
    if persistent:
        persistent[0].all_gather(persistent)


def gather_in_forward(root: Any, parameter: Any) -> None:
    """Gather a parameter at stage 3 that a forward reads; outside a forward nothing happens.

    Args:
        root: The engine's module.
        parameter: One of its parameters, which may be on its way already for a submodule that comes later.
    """
    if not getattr(root._parameters, "_in_forward", False) or not is_away(parameter):
        return
    if parameter in root.ds_inflight_param_registry:
        root.ds_inflight_param_registry.pop(parameter).wait()
    else:
        parameter.all_gather()


def hold_in_forward(root: Any, parameter: Any) -> None:
    """Keep a parameter that a forward has read until the submodule that did so has run, and gather it in its backward.

    Args:
        root: The engine's module.
        parameter: What ``gather_in_forward`` was given.
    """
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    reader = FWD_MODULE_STACK[-1] if getattr(root._parameters, "_in_forward", False) and FWD_MODULE_STACK else None
    own = () if reader is None else reader._parameters.values()
    if reader is None or parameter.is_external_param or any(parameter is each for each in own):
        return
    register_external_parameter(reader, parameter)
    parameter.ds_active_sub_modules.add(reader.ds_id)


def end_failed_forward(engine: Any) -> None:
    """Mark a forward that an exception has ended as over in an engine's submodules, at stage 3."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

    engine._forward_epilogue()
    inside = set(engine.module.modules()) - {engine.module}
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module not in inside]


def gathered_for(submodule: Any) -> Iterator[Any]:
    """List the parameters that stage 3 gathers for a submodule, and may let go of once it has run."""
    yield from (each for each in submodule._parameters.values() if each is not None)
    yield from (each for _, each in submodule.ds_external_parameters())


def publish_shards(zero: Any) -> None:
    """Copy the shards' values to where parameters are whole between steps, at stage 3."""
    zero.checkpoint_event_prologue()
    for number in range(len(zero.fp16_groups)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    zero.checkpoint_event_epilogue()


def destroy(engine: Any) -> None:
    """Detach an engine from its module; DeepSpeed leaves two hooks, and a list and a cache that keep it alive."""
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    engine.destroy()
    engine.module_forward_pre_hook.remove()
    engine.module_forward_post_hook.remove()
    for parameter in engine.module.parameters():  # what is whole again can be set up again
        for name in [] if is_away(parameter) else [each for each in vars(parameter) if each.startswith("ds_")]:
            delattr(parameter, name)
    FWD_MODULE_STACK[:] = [module for module in FWD_MODULE_STACK if module not in set(engine.module.modules())]
    released = vars(PartitionedParameterCoordinator)["_PartitionedParameterCoordinator__params_to_release"]
    # Of every engine of the process: the others compute theirs once more.
    inspect.getclosurevars(released).nonlocals["func"].cache_clear()
