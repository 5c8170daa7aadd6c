"""Checkpoint IO: the parts that save and load, which checkpoints of a run stay, and what a checkpoint holds.

One format for every strategy: full tensors split into boxes, in safetensors files under one manifest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shard_core.checkpoint.async_io import AsyncCheckpointIO
    from shard_core.checkpoint.format.chunk_index import TensorRecord
    from shard_core.checkpoint.format.folder import latest
    from shard_core.checkpoint.inspection.compare import Comparison, Difference, compare
    from shard_core.checkpoint.inspection.compare_elements import ElementDifferences
    from shard_core.checkpoint.inspection.inspect import (
        GroupSummary,
        Inspection,
        KindSummary,
        OptimizerSummary,
        inspect,
    )
    from shard_core.checkpoint.inspection.verify import Damage, Verdict, verify
    from shard_core.checkpoint.interface import BegunSave, CheckpointIO, LoadedCheckpoint, SaveHandle
    from shard_core.checkpoint.interop.hf_export import Exported, export
    from shard_core.checkpoint.retention.policy import Retention
    from shard_core.checkpoint.save.async_save import async_save
    from shard_core.checkpoint.sharded_io import ShardedCheckpointIO

__all__ = [
    "AsyncCheckpointIO",
    "BegunSave",
    "CheckpointIO",
    "Comparison",
    "Damage",
    "Difference",
    "ElementDifferences",
    "Exported",
    "GroupSummary",
    "Inspection",
    "KindSummary",
    "LoadedCheckpoint",
    "OptimizerSummary",
    "Retention",
    "SaveHandle",
    "ShardedCheckpointIO",
    "TensorRecord",
    "Verdict",
    "async_save",
    "compare",
    "export",
    "inspect",
    "latest",
    "verify",
]

#: The names of each module: ``shard checkpoint`` reaches what it needs without importing torch.
_HOMES = {
    "async_io": ("AsyncCheckpointIO",),
    "format.chunk_index": ("TensorRecord",),
    "format.folder": ("latest",),
    "inspection.compare": ("Comparison", "Difference", "compare"),
    "inspection.compare_elements": ("ElementDifferences",),
    "inspection.inspect": ("GroupSummary", "Inspection", "KindSummary", "OptimizerSummary", "inspect"),
    "inspection.verify": ("Damage", "Verdict", "verify"),
    "interface": ("BegunSave", "CheckpointIO", "LoadedCheckpoint", "SaveHandle"),
    "interop.hf_export": ("Exported", "export"),
    "retention.policy": ("Retention",),
    "save.async_save": ("async_save",),
    "sharded_io": ("ShardedCheckpointIO",),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
