"""What an engine is made of: all that the strategy-side files of a backend import besides the users' ``shard_core``.

Its parts are alike in every backend; which of them one takes is up to its author. It imports torch, so the files that
must not, ``plugin.py`` and ``config.py``, take what they need from ``shard_core.plugins``.
"""

from __future__ import annotations

from shard_core._versions import is_compiled
from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.state.named_state import HeldSlot, NamedState
from shard_core.checkpoint.state.names import ModuleTensors, NamedTensors
from shard_core.checkpoint.state.optimizer_record import OptimizerRecord
from shard_core.checkpoint.state.optimizer_state import OptimizerTensors
from shard_core.checkpoint.state.ownership import Ownership
from shard_core.checkpoint.state.shard import FlatPart, TensorShard, shards_of_range
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.state.training_state import KeySpace, Slot, TrainingState
from shard_core.collectives.interface import Collectives
from shard_core.collectives.process_group import ProcessGroupCollectives, carrying_device, translate_torch_errors
from shard_core.collectives.rank_agreement import check_called_alike, check_used_alike
from shard_core.collectives.single import SingleCollectives
from shard_core.coordinator import Coordinator
from shard_core.data_parallel.ddp_modules import DDPModules
from shard_core.forward_calls import ForwardContexts, NoInferenceMode, RunningCall, without_inference_mode
from shard_core.fully_shard.entry_methods import EntryMethods
from shard_core.fully_shard.ignored import ignored_parameters
from shard_core.fully_shard.offload import offload_policy
from shard_core.fully_shard.policy import ManualUnits, chosen_by
from shard_core.fully_shard.precision import precision_of, wire_policy
from shard_core.fully_shard.prefetch import set_prefetching
from shard_core.fully_shard.second_derivatives import on_created_graph
from shard_core.fully_shard.sharder import FullySharder
from shard_core.fully_shard.units import Unit, find_units, groups_that_part, unit_sizes, with_chosen
from shard_core.gradients import (
    LocalGradient,
    all_finite,
    clip_norm,
    clip_values,
    inside_objects,
    local_gradients,
    move_hooks,
    scale,
    total_norm,
)
from shard_core.initialization.materialize import Materializer
from shard_core.initialization.meta import initialise, needs_values
from shard_core.initialization.recording import Recording, is_recorded, record
from shard_core.launcher.interface import Launcher, ProcessInfo
from shard_core.mesh import DataRanks
from shard_core.optim.kernels import fast_step, inside_step
from shard_core.optim.local_step import local_step
from shard_core.optim.owned_step import owned_step
from shard_core.parameters import (
    COUNTERS,
    ParameterNames,
    laid_out_like,
    local_part,
    make_contiguous,
    plain_module_name,
    plain_name,
)
from shard_core.precision.dtypes import check_module, convert_input, convert_module, dtype_named
from shard_core.precision.interface import Precision
from shard_core.precision.mixed import MixedPrecision
from shard_core.precision.policies import POLICIES
from shard_core.precision.scaler import GradientScaler
from shard_core.precision.true import TruePrecision
from shard_core.preparation.layers import prepare_layers
from shard_core.preparation.replacement_check import ReplacementCheck
from shard_core.preparation.submodules import find_blocks
from shard_core.replicas import AveragedGradients, send_values
from shard_core.strategies.ddp import DDPStrategy
from shard_core.strategies.single import SingleStrategy
from shard_core.strategy.engine import Engine
from shard_core.strategy.torch_engine import TorchEngine
from shard_core.structures import follow_references

__all__ = [
    "COUNTERS",
    "POLICIES",
    "AveragedGradients",
    "Box",
    "Collectives",
    "Coordinator",
    "DDPModules",
    "DDPStrategy",
    "DataRanks",
    "Engine",
    "EntryMethods",
    "FlatPart",
    "ForwardContexts",
    "FullySharder",
    "GradientScaler",
    "HeldSlot",
    "KeySpace",
    "Launcher",
    "LocalGradient",
    "ManualUnits",
    "Materializer",
    "MixedPrecision",
    "ModuleTensors",
    "NamedState",
    "NamedTensors",
    "NoInferenceMode",
    "OptimizerRecord",
    "OptimizerTensors",
    "Ownership",
    "ParameterNames",
    "Precision",
    "ProcessGroupCollectives",
    "ProcessInfo",
    "Recording",
    "ReplacementCheck",
    "RunningCall",
    "SingleCollectives",
    "SingleStrategy",
    "Slot",
    "TensorShard",
    "TensorState",
    "TorchEngine",
    "TrainingState",
    "TruePrecision",
    "Unit",
    "all_finite",
    "carrying_device",
    "check_called_alike",
    "check_module",
    "check_used_alike",
    "chosen_by",
    "clip_norm",
    "clip_values",
    "convert_input",
    "convert_module",
    "dtype_named",
    "fast_step",
    "find_blocks",
    "find_units",
    "follow_references",
    "groups_that_part",
    "ignored_parameters",
    "initialise",
    "inside_objects",
    "inside_step",
    "is_compiled",
    "is_recorded",
    "laid_out_like",
    "local_gradients",
    "local_part",
    "local_step",
    "make_contiguous",
    "move_hooks",
    "needs_values",
    "offload_policy",
    "on_created_graph",
    "owned_step",
    "plain_module_name",
    "plain_name",
    "precision_of",
    "prepare_layers",
    "record",
    "scale",
    "send_values",
    "set_prefetching",
    "shards_of_range",
    "total_norm",
    "translate_torch_errors",
    "unit_sizes",
    "wire_policy",
    "with_chosen",
    "without_inference_mode",
]
