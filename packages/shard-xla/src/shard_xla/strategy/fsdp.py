"""Fully sharded data parallel training on upstream's XlaFullyShardedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shard_core import SetupError, Strategy
from shard_core.backend import (
    FlatPart,
    LocalGradient,
    NoInferenceMode,
    ProcessGroupCollectives,
    check_used_alike,
    send_values,
)
from shard_xla.checkpoint import FlatState
from shard_xla.config import XLAFSDPConfig
from shard_xla.plugin import FSDP
from shard_xla.strategy import runtime, units
from shard_xla.strategy.engine import XLAEngine
from shard_xla.strategy.module_hooks import FullParameterHooks, call_through
from shard_xla.strategy.module_tensors import (
    ModuleTensors,
    check_on_host,
    release,
    take_own_names,
    take_whole_values,
    tensors_of_average,
)
from shard_xla.strategy.named_parameters import list_wholes_inside
from shard_xla.strategy.normalization import correct_normalization
from shard_xla.strategy.optimizers import check_stale_parameters, flat_value, repoint_to_shards
from shard_xla.strategy.recompilation import RecompilationWatch
from shard_xla.strategy.scaled_shards import ScaledShards
from shard_xla.strategy.tracing import stepping_lists

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from shard_core.backend import ParameterNames, TrainingState
    from shard_xla.collectives import ReduceScatter


@dataclasses.dataclass(frozen=True, eq=False)
class _Sharded:
    """A module that was set up: where its tensors are, weakly, what computes, and what its gradients were."""

    tensors: ModuleTensors
    hooks: weakref.ref[FullParameterHooks]
    scaled: ScaledShards = dataclasses.field(default_factory=ScaledShards)

    def note_gradients(self, *, stepped: bool = False) -> None:
        """Note what gradients are before users may change them."""
        shards = (place.tensor for place in self.tensors.places.values() if place.is_parameter)
        self.scaled.note(shards, stepped=stepped)


class XLAFSDPStrategy(XLAEngine, Strategy):
    """Keeps on every rank only a shard of parameters, gradients and optimizer state, on an XLA device.

    On CPUs the ranks talk through the host: training as on TPUs, to develop and test with, not to be fast.

    Example:
        >>> XLAFSDPStrategy(devices=2, reshard_after_forward=False).config.reshard_after_forward
        False
    """

    default_info = FSDP
    config_type = XLAFSDPConfig
    config: XLAFSDPConfig
    engine_minds_plain_backward = True
    engine_collectives_types = {"host": ProcessGroupCollectives}
    _sharded: weakref.WeakKeyDictionary[torch.nn.Module, _Sharded]
    _watch: RecompilationWatch

    def engine_mesh(self) -> DeviceMesh | None:
        """Start the device; every rank sees its own data."""
        runtime.check_accelerator(self.info.name, self.options.accelerator)
        runtime.start(self.info.name, devices=1, spmd=False)
        # Made on the rank it serves: what they hold cannot travel there with the strategy.
        self._sharded = weakref.WeakKeyDictionary()
        self._watch = RecompilationWatch()
        if self.collectives.rank == 0 and self.collectives.world_size > 1:
            runtime.announce(
                f"strategy {self.info.name!r} runs on CPUs with collectives='host', a development mode: every unit's "
                "forward and backward waits for messages between host processes."
            )
        return None

    def engine_teardown(self) -> None:
        """Release the modules; there are none where the device was not started."""
        if "_sharded" in vars(self):
            self._sharded.clear()

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Shard rank 0's values over all ranks; shards stand under their parameters' names in the module."""
        check_on_host(names)
        send_values(module)
        tensors = ModuleTensors(module)
        correct_normalization(module)
        root = units.shard(module, self.config, rank=self.global_rank, world_size=self.world_size)
        tensors.tie_buffers()
        hooks = FullParameterHooks(root, {id(tensors.places[name].tensor): name for name in tensors.places})
        hooks.take_users_hooks(names)
        hooks.compare_ranks(self.collectives)
        self._sharded[module] = _Sharded(tensors, weakref.ref(hooks))
        call_through(module, root)
        list_wholes_inside(root)
        take_own_names(module)
        take_whole_values(module, tensors, self.global_rank)
        repoint_to_shards(optimizers, names, tensors, self.global_rank)
        release(names)
        NoInferenceMode(root)
        return root

    def engine_add_optimizer(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> None:
        """Point the optimizer at the shards."""
        repoint_to_shards([optimizer], names, self._sharded[module].tensors, self.global_rank)

    def engine_lay_out_state(self, parameter: torch.Tensor, slot: str, value: torch.Tensor) -> torch.Tensor:
        """Slice whole values to this rank's shards."""
        for sharded in self._sharded.values():
            value = flat_value(sharded.tensors, self.global_rank, parameter, slot, value)
        return value

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Accumulate whole gradients on this rank."""
        return next(hooks for hooks in self._hooks() if hooks.root is module).deferring()

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd; gradients are reduced and scattered as soon as a parameter's is there."""
        del module
        self._check_scaled(adds=True)
        try:
            with contextlib.ExitStack() as running:
                for hooks in self._hooks():
                    running.enter_context(hooks.backward())
                loss.backward(**kwargs)
            check_used_alike([pair for hooks in self._hooks() for pair in hooks.used()], self.collectives)
        except SetupError:
            for message in self._messages():
                message.drop()
            raise
        for message in self._messages():
            message.send()
        for hooks in self._hooks():
            hooks.end_backward()
        self._note_gradients()

    def engine_on_gradient(
        self, parameter: torch.Tensor, called: Callable[[torch.Tensor], object]
    ) -> RemovableHandle | None:
        """Listen to the whole parameter, whose gradient autograd makes."""

        def call(gradient: torch.Tensor) -> None:
            del gradient
            called(parameter)

        found = (hooks.full_of(parameter) for hooks in self._hooks())
        full = next((each for each in found if each is not None), None)
        if full is None:
            return None
        trained = full.requires_grad
        full.requires_grad_(True)  # torch takes no hooks else, and what is frozen may be unfrozen later
        handle: RemovableHandle = full.register_hook(call)
        full.requires_grad_(trained)
        return handle

    def engine_drop_unfinished(self) -> None:
        """Throw away what waits to be sent, and have units begin anew."""
        for message in self._messages():
            message.drop()
        for hooks in self._hooks():
            hooks.drop_unfinished()

    def engine_check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients that wait on their rank."""
        for hooks in self._hooks():
            hooks.check_sent(optimizer)
        self._check_scaled()

    def engine_gradients(self, optimizer: torch.optim.Optimizer) -> list[LocalGradient]:
        """Return this rank's ranges of the gradients; their padding is zero."""
        return [
            LocalGradient(parameter.grad, (dist.group.WORLD,))
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip as every strategy does; what users change afterwards is looked at again."""
        norm = super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self._note_gradients()
        return norm

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clip as every strategy does; what users change afterwards is looked at again."""
        super().clip_gradients_value(module, optimizer, clip_val)
        self._note_gradients()

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        """Step, and run what is pending: else the graph would grow from step to step."""
        import torch_xla

        check_stale_parameters(self.info.name, optimizer, self._sharded)
        with stepping_lists(optimizer):
            optimizer.step(closure, **kwargs)
        self._note_gradients(stepped=True)
        torch_xla.sync()
        self._watch.step()

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe which range of which parameter this rank holds."""
        for hooks in self._hooks():
            hooks.check_values()
        tensors = {
            key: self._sharded[module].tensors if module in self._sharded else tensors_of_average(module)
            for key, module in modules.items()
        }
        return FlatState(tensors, optimizers, rank=self.global_rank, world_size=self.world_size)

    def engine_flat_parts(self, module: torch.nn.Module) -> Mapping[torch.Tensor, FlatPart]:
        """Return the shards as they are: split by rows or elements, with what fills them up."""
        sharded = self._sharded[module]
        hooks = sharded.hooks()
        if hooks is not None:
            hooks.check_values()
        places = [place for place in sharded.tensors.places.values() if place.is_parameter]
        shards = [(place.shape, place.tensor) for place in places]
        rank = self.global_rank
        return {shard: FlatPart(shape=shape, start=rank * shard.numel(), values=shard) for shape, shard in shards}

    def _note_gradients(self, *, stepped: bool = False) -> None:
        for sharded in self._sharded.values():
            sharded.note_gradients(stepped=stepped)

    def _check_scaled(self, *, adds: bool = False) -> None:
        for sharded in self._sharded.values():
            sharded.scaled.check(self.collectives, adds=adds)

    def _messages(self) -> list[ReduceScatter]:
        return [message for hooks in self._hooks() for message in units.messages_of(hooks.root)]

    def _hooks(self) -> list[FullParameterHooks]:
        found = (sharded.hooks() for sharded in self._sharded.values())
        return [hooks for hooks in found if hooks is not None]
