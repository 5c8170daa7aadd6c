"""Keywords of torch's own FSDP that have no option of their own here, each with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Options that people pass because torch's older wrapper needs them; the engine knows one value of each.
ALWAYS: Final[Mapping[str, tuple[bool, str]]] = {
    "limit_all_gathers": (True, "fully_shard bounds memory in any case, without making the host wait"),
    "use_orig_params": (True, "fully_shard keeps every parameter under its own name and makes no flat ones"),
}

#: Keywords of torch's ``FullyShardedDataParallel`` and ``fully_shard``, and of strategies elsewhere.
REFUSED: Final[Mapping[str, str]] = {
    "device_id": "a rank's device follows from accelerator, devices and parallel_devices",
    "dp_mesh_dims": "device_mesh has the axes replicate and shard; strategy 'tp' has an axis for tensor parallelism",
    "ignored_params": "the option is called ignored_states",
    "mesh": "the option is called device_mesh",
    "mp_policy": "the option is called mixed_precision",
    "offload_policy": "the option is called cpu_offload",
    "precision_plugin": "the argument is called precision",
    "process_group": "a group of some ranks would leave out the others, whose checkpoints and norms count; say with "
    "device_mesh how all ranks are arranged",
    "shard_placement_fn": "every parameter is sharded along its first dimension",
    "state_dict_config": "tensors are read and written one at a time, so there is nothing to offload; the form of "
    "checkpoints is state_dict_type",
}
