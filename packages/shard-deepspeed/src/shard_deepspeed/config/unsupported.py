"""Options that DeepSpeed's users know and that are not honoured yet: declared, so that none is swallowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from shard_core.plugins import option, refuse_other_values


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """Options that move parameters and optimizer state out of the accelerator's memory."""

    remote_device: str | None = option(None, "where modules are built: cpu or nvme; None for the rank's device")
    offload_optimizer: bool = option(False, "keep optimizer state in host memory or on NVMe")
    offload_parameters: bool = option(False, "stage 3: keep parameters in host memory or on NVMe")
    offload_params_device: str = option("cpu", "where offloaded parameters stand: cpu or nvme")
    nvme_path: str = option("/local_nvme", "the folder for what is offloaded to NVMe")
    params_buffer_count: int = option(5, "buffers for parameters offloaded to NVMe")
    params_buffer_size: int = option(100_000_000, "elements in each buffer for parameters offloaded to NVMe")
    max_in_cpu: int = option(1_000_000_000, "elements of parameters that stay in host memory beside NVMe")
    offload_optimizer_device: str = option("cpu", "where offloaded optimizer state stands: cpu or nvme")
    optimizer_buffer_count: int = option(4, "buffers for optimizer state offloaded to NVMe")
    block_size: int = option(1_048_576, "bytes in one request to NVMe")
    queue_depth: int = option(8, "requests to NVMe under way at once")
    single_submit: bool = option(False, "submit requests to NVMe one by one")
    overlap_events: bool = option(True, "submit requests to NVMe before earlier ones are done")
    thread_count: int = option(1, "threads that serve one request to NVMe")
    pin_memory: bool = option(False, "pin host memory for what is offloaded")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationOptions:
    """Options of DeepSpeed's own activation checkpointing."""

    partition_activations: bool = option(False, "shard checkpointed activations over model-parallel ranks")
    cpu_checkpointing: bool = option(False, "keep sharded activations in host memory")
    contiguous_memory_optimization: bool = option(False, "copy sharded activations into one buffer")
    synchronize_checkpoint_boundary: bool = option(False, "wait for the device at each checkpointed block")


_MOVES_NOTHING = "this backend does not offload yet"
_KEEPS_ACTIVATIONS = "this backend does not shard or move activations yet"
_REASONS = {
    **dict.fromkeys((field.name for field in dataclasses.fields(OffloadOptions)), _MOVES_NOTHING),
    **dict.fromkeys((field.name for field in dataclasses.fields(ActivationOptions)), _KEEPS_ACTIVATIONS),
    "allgather_bucket_size": "DeepSpeed 0.19 gathers what was stepped in one message, and would not look at it",
    "logging_batch_size_per_gpu": "DeepSpeed reports speed in a step of its own, which is not taken here",
    "allgather_partitions": "DeepSpeed 0.19 always gathers, and would not look at it",
    "config": "a configuration of DeepSpeed's own is not read yet, give the options themselves",
    "load_full_weights": "load_weights() reads a file of all weights at every stage, with no switch",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnsupportedOptions(ActivationOptions, OffloadOptions):
    """All of them; a value other than the default is refused.

    Raises:
        InvalidOption: If one has another value than its default.
    """

    allgather_bucket_size: int = option(200_000_000, "how many elements of parameters travel in one message")
    logging_batch_size_per_gpu: int | str = option(
        "auto", "samples in a rank's micro-batch, for DeepSpeed's own reports of speed"
    )
    allgather_partitions: bool = option(True, "gather stepped parameters at once rather than rank by rank")
    config: str | Path | dict[str, Any] | None = option(None, "a whole configuration of DeepSpeed's own, or its file")
    load_full_weights: bool = option(False, "stage 3: load weights from one file that holds all of them")

    def __post_init__(self) -> None:
        """Refuse what would be swallowed."""
        refuse_other_values(self, _REASONS)
