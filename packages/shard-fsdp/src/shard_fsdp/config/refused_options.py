"""Keywords of torch's own FSDP, and of strategies elsewhere, that leave nothing to choose, each with the reason."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final, Literal

from shard_core import InvalidOption
from shard_core.plugins import DATA_AXIS, MeshShape, option, refuse_other_values

if TYPE_CHECKING:
    from collections.abc import Mapping

_ALWAYS: Final[Mapping[str, str]] = {
    "limit_all_gathers": "fully_shard bounds memory in any case, without making the host wait",
    "use_orig_params": "fully_shard keeps every parameter under its own name and makes no flat ones",
    "sync_module_states": "a model of different values is nobody's, so all ranks start from rank 0's",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleValuedOptions:
    """Options that people pass because they are needed elsewhere; the engine knows one value of each.

    Raises:
        InvalidOption: If one has another value.
    """

    limit_all_gathers: bool = option(True, "always so: memory is bounded without making the host wait")
    use_orig_params: bool = option(True, "always so: parameters keep their names and are never flattened")
    sync_module_states: bool = option(True, "start every rank from rank 0's values; there is no other way")
    data_parallel_size: int | Literal["auto"] = option(
        "auto", "ranks that see different data: all of them; another number is an error"
    )

    def __post_init__(self) -> None:
        """Check values; how many ranks there are is known when they are."""
        refuse_other_values(self, _ALWAYS)
        size = self.data_parallel_size
        if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise InvalidOption(f"data_parallel_size is {size!r}; give a number of ranks from 1 up, or 'auto'.")

    def check_ranks(self, world_size: int) -> None:
        """Check that all ranks see different data.

        Args:
            world_size: How many there are.

        Raises:
            InvalidOption: If ``data_parallel_size`` is another number.
        """
        MeshShape({DATA_AXIS: self.data_parallel_size}).fitted(world_size)


#: Keywords of torch's ``FullyShardedDataParallel`` and ``fully_shard``, and of strategies elsewhere.
REFUSED: Final[Mapping[str, str]] = {
    "buffer_dtype": "it is a field of mixed_precision; precision= decides unless that is given",
    "compute_device": "a rank's device follows from accelerator, devices and parallel_devices",
    "compute_dtype": "mixed_precision has it, or precision='bf16-mixed'",
    "device_id": "a rank's device follows from accelerator, devices and parallel_devices",
    "dp_mesh_dims": "device_mesh has the axes replicate and shard; strategy 'tp' has an axis for tensor parallelism",
    "flatten_parameters": "every parameter is sharded by itself and keeps its name",
    "fp32_reduce_scatter": "mixed_precision has the dtype gradients are reduced in",
    "ignored_params": "the option is called ignored_states",
    "mesh": "the option is called device_mesh",
    "min_num_params": "units are found by bytes, with the option unit_bytes",
    "move_params_to_cpu": "the option is called cpu_offload",
    "mp_policy": "the option is called mixed_precision",
    "offload_policy": "the option is called cpu_offload",
    "precision_plugin": "the argument is called precision",
    "process_group": "a group of some ranks would leave out the others, whose checkpoints and norms count; say with "
    "device_mesh how all ranks are arranged",
    "shard_placement_fn": "every parameter is sharded along its first dimension",
    "sequential_save": "ranks write their parts side by side; the form of checkpoints is state_dict_type",
    "state_dict_device": "tensors are read and written one at a time, so they need no other device",
    "state_dict_config": "tensors are read and written one at a time, so there is nothing to offload; the form of "
    "checkpoints is state_dict_type",
}
