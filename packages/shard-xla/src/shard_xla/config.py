"""The options of the strategies of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from shard_core import InvalidOption
from shard_core.plugins import option

#: Upstream's keywords that are declared and refused so far, with what to do instead.
_NOT_YET = {
    "sequential_save": "every rank writes its own file, all at once",
    "flatten_parameters": "parameters are sharded one by one",
    "compute_dtype": "use precision='bf16-mixed', which runs autocast over float32 parameters",
    "buffer_dtype": "use precision=, which names the dtype of buffers too",
    "fp32_reduce_scatter": "gradients travel in float32 under every precision of this strategy",
    "sharding_groups": "all ranks shard together",
    "sharding_rank": "it is this process's rank",
    "sharding_world_size": "it is the number of ranks",
    "pin_layout_in_collective_ops": "collectives over the host have no layouts to pin",
    "auto_wrapper_callable": "use activation_checkpointing_policy, which is what it is mostly for",
    "param_init_fn": "build the module on the host, under module_init_context",
}

_FLAGS = (
    "reshard_after_forward",
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "disable_reshard_on_root",
    "shard_param_on_dim_0",
    "coalesce_all_gather_ops",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class XLAFSDPConfig:
    """Options of ``xla_fsdp``; those below ``sequential_save`` are upstream's keywords.

    Raises:
        InvalidOption: If a value has the wrong type, makes no sense, or is not there yet.
    """

    auto_wrap_policy: set[type] | Callable[..., bool] | None = option(
        None, "which submodules are units of their own: classes, or a policy as upstream takes it; None for none"
    )
    activation_checkpointing_policy: set[type] | None = option(
        None, "classes of submodules that compute their activations again in backward instead of keeping them"
    )
    state_dict_type: str = option("sharded", "in which form checkpoints are written: sharded or full")
    sequential_save: bool = option(False, "let ranks write one after another (not yet)")
    reshard_after_forward: bool = option(True, "free a unit's whole parameters between forward and backward")
    flatten_parameters: bool = option(False, "join a unit's parameters into one vector (not yet)")
    execute_sharding_on_init: bool = option(True, "shard at once, so that whole parameters are freed during setup")
    optimization_barrier_in_forward: bool = option(True, "keep the compiler from joining units' forwards")
    optimization_barrier_in_backward: bool = option(True, "keep the compiler from joining units' backwards")
    sync_on_finalization: bool = option(False, "run the graph at the end of each backward")
    disable_reshard_on_root: bool = option(True, "keep the root's whole parameters until its backward")
    compute_dtype: Any = option(None, "what everything is cast to (not yet: precision= says it)")
    buffer_dtype: Any = option(None, "what buffers are cast to (not yet: precision= says it)")
    fp32_reduce_scatter: bool = option(False, "reduce gradients in float32 though computed in less (not yet)")
    sharding_groups: Any = option(None, "ranks that shard together, as lists (not yet: all do)")
    sharding_rank: int | None = option(None, "this process's place in its sharding group (not yet)")
    sharding_world_size: int | None = option(None, "how many ranks a sharding group has (not yet)")
    shard_param_on_dim_0: bool = option(True, "split parameters by rows, which shows their dims, not by elements")
    pin_layout_in_collective_ops: bool = option(True, "pin layouts in XLA's own collectives (not yet)")
    reduce_scatter_bucket_size_mb: int = option(0, "how many MiB of gradients share a message; 0 for all of a unit's")
    coalesce_all_gather_ops: bool = option(False, "gather a unit's parameters in one message, if split by rows")
    auto_wrapper_callable: Any = option(None, "what wraps a unit instead of upstream's class (not yet)")
    param_init_fn: Any = option(None, "what fills parameters that were built on the meta device (not yet)")

    def __post_init__(self) -> None:
        """Check types and values."""
        _check_policies(self.auto_wrap_policy, self.activation_checkpointing_policy)
        _check_form(self.state_dict_type)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _NOT_YET and value != field.default:
                raise InvalidOption(
                    f"{field.name}={value!r} is not there yet; leave it {field.default!r}: {_NOT_YET[field.name]}."
                )
            if field.name in _FLAGS and not isinstance(value, bool):
                raise InvalidOption(f"{field.name} is {value!r}; give True or False.")
        size = self.reduce_scatter_bucket_size_mb
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidOption(f"reduce_scatter_bucket_size_mb is {size!r}; give a whole number of MiB, or 0.")
        if self.coalesce_all_gather_ops and not self.shard_param_on_dim_0:
            raise InvalidOption(
                "coalesce_all_gather_ops=True loses the values of parameters that are not split by rows, an error of "
                "torch_xla; leave shard_param_on_dim_0=True, or coalesce_all_gather_ops=False."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class XLASPMDConfig:
    """Options of ``xla_spmd``.

    Raises:
        InvalidOption: If a value has the wrong type, makes no sense, or is not there yet.
    """

    virtual_devices: int | None = option(
        None, "how many devices the host's CPU pretends to be; None for what CPU_NUM_DEVICES says, else 1"
    )
    auto_wrap_policy: set[type] | Callable[..., bool] | None = option(
        None, "which submodules' outputs are sharded too: classes, or a policy as upstream takes it"
    )
    activation_checkpointing_policy: set[type] | None = option(
        None, "classes of submodules that compute their activations again in backward instead of keeping them"
    )
    shard_output: Callable[..., None] | None = option(
        None, "marks how an output is sharded, called with it and the mesh; None shards every tensor's first dim"
    )
    extra_data_axis: str | None = option(None, "a further axis of the mesh that data is split over (not yet)")
    state_dict_type: str = option("sharded", "in which form checkpoints are written: sharded or full")

    def __post_init__(self) -> None:
        """Check types and values."""
        _check_policies(self.auto_wrap_policy, self.activation_checkpointing_policy)
        _check_form(self.state_dict_type)
        count = self.virtual_devices
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise InvalidOption(f"virtual_devices is {count!r}; give a whole number from 1 up, or None.")
        if self.shard_output is not None and not callable(self.shard_output):
            raise InvalidOption(f"shard_output is {self.shard_output!r}; give a callable of an output and a mesh.")
        if self.extra_data_axis is not None:
            raise InvalidOption(
                f"extra_data_axis={self.extra_data_axis!r} is not there yet; leave it None: all devices are one axis."
            )


def _check_form(form: object) -> None:
    if form not in ("sharded", "full"):
        raise InvalidOption(f"state_dict_type is {form!r}; give 'sharded' or 'full'.")


def _check_policies(wrap: object, checkpoint: object) -> None:
    if wrap is not None and not _are_classes(wrap) and (isinstance(wrap, type) or not callable(wrap)):
        raise InvalidOption(f"auto_wrap_policy is {wrap!r}; give a set of module classes, a policy, or None.")
    if checkpoint is not None and not _are_classes(checkpoint):
        raise InvalidOption(
            f"activation_checkpointing_policy is {checkpoint!r}; give a set of module classes, or None."
        )


def _are_classes(value: object) -> bool:
    return isinstance(value, set | frozenset) and bool(value) and all(isinstance(each, type) for each in value)
