"""Saving and loading in one process, without ranks to talk to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from thread_ranks import all_ranks

from shard_core.checkpoint.sharded import ShardedCheckpointIO
from shard_core.checkpoint.tensor_state import TensorState

if TYPE_CHECKING:
    from shard_core.checkpoint.interface import LoadedCheckpoint

Modules = Mapping[str, torch.nn.Module] | torch.nn.Module
Optimizers = Mapping[str, torch.optim.Optimizer] | torch.optim.Optimizer | None


def state_of(modules: Modules, optimizers: Optimizers = None) -> TensorState:
    """Describe one process's modules and optimizers; a single one gets the usual key."""
    named = {"model": modules} if isinstance(modules, torch.nn.Module) else modules
    stepped = {"optimizer": optimizers} if isinstance(optimizers, torch.optim.Optimizer) else optimizers or {}
    return TensorState(named, stepped, rank=0, world_size=1)


def save(path: Any, modules: Modules, optimizers: Optimizers = None, values: Any = None, **options: Any) -> None:
    """Save as a world of one."""

    def on_rank(coordinator: Any) -> None:
        state = state_of(modules, optimizers)
        ShardedCheckpointIO().save(path, state, values or {}, coordinator=coordinator, information={}, **options)

    all_ranks(1, on_rank)


def load(path: Any, modules: Modules, optimizers: Optimizers = None, **options: Any) -> LoadedCheckpoint:
    """Load as a world of one."""

    def on_rank(coordinator: Any) -> LoadedCheckpoint:
        return ShardedCheckpointIO().load(path, state_of(modules, optimizers), coordinator=coordinator, **options)

    return all_ranks(1, on_rank)[0]
