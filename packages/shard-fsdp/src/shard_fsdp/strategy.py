"""Fully sharded data parallel training on torch's ``fully_shard`` (FSDP2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core import Strategy
from shard_core.backend import (
    FullySharder,
    ManualUnits,
    TensorState,
    TorchEngine,
    Unit,
    chosen_by,
    find_units,
    ignored_parameters,
    offload_policy,
    precision_of,
    prepare_layers,
    set_prefetching,
    wire_policy,
    with_chosen,
)
from shard_fsdp.config import FSDPConfig
from shard_fsdp.plugin import FSDP
from shard_fsdp.tuning import worth_trying

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from shard_core.backend import ParameterNames, Precision, TrainingState


class FSDPStrategy(TorchEngine, Strategy):
    """Keeps on every rank only a shard of parameters, gradients and optimizer state.

    Whole parameters exist for one unit at a time: neighbouring blocks of the module, joined until
    a message is worth sending.

    Example:
        >>> FSDPStrategy(devices=2, unit_bytes=2**20).config.unit_bytes
        1048576
    """

    default_info = FSDP
    config_type = FSDPConfig
    config: FSDPConfig
    engine_minds_plain_backward = True
    _sharding: FullySharder
    _by_hand: ManualUnits

    def engine_precision(self, precision: Precision) -> Precision:
        """Replace an argument ``precision`` that says nothing else by ``mixed_precision``."""
        return precision_of(self.config.mixed_precision, precision)

    def engine_mesh(self) -> DeviceMesh:
        """Arrange the ranks as the options say, by default along one axis."""
        config = self.config
        config.check_ranks(self.world_size)
        mesh = config.build_mesh(self.root_device.type, self.local_world_size, self.options.timeout)
        # Made on the rank it serves: what it holds cannot travel there with the strategy.
        self._sharding = FullySharder(
            mesh,
            self.collectives,
            units=self._units,
            reshard_after_forward=config.reshards,
            mixed_precision=wire_policy(config.mixed_precision, self.precision.policy),
            offload=offload_policy(config.cpu_offload, self.root_device),
            deferred=None if config.defer_sync == "auto" else config.defer_sync,
        )
        self._by_hand = ManualUnits()
        return mesh

    def engine_init_context(self, empty_init: bool) -> contextlib.AbstractContextManager[None]:
        """Record what constructors do instead of doing it; setup replays it shard by shard."""
        return self._sharding.recording(empty_init)

    def engine_sharded_context(self) -> contextlib.AbstractContextManager[None]:
        """Mark what users wrap; setup makes units of it."""
        return self._by_hand.enabled()

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Shard the module unit by unit, then fill its shards with their values."""
        prepare_layers(module, self.config, self._chosen(module))
        whole = ignored_parameters(module, self.config.ignored_modules, self.config.ignored_states)
        units = self._sharding.shard(
            module,
            optimizers,
            names,
            policy=self.precision.policy,
            device=self.root_device,
            whole=whole,
            param_init_fn=self.config.param_init_fn,
        )
        config = self.config
        set_prefetching(module, units, backward=config.gathered_in_backward, forward=config.forward_prefetch)
        return module

    @property
    def engine_defers_sync(self) -> bool:
        """Whether ``defer_sync`` leaves anything to the last micro-batch."""
        return self.config.defer_sync != "nothing"

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Defer to the last micro-batch what ``defer_sync`` says."""
        return self._sharding.deferred(module)

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd; what earlier micro-batches deferred must have gone with the last."""
        with self._sharding.backward(module, loss) as watched:
            super().engine_backward(watched, module, **kwargs)

    def engine_on_gradient(self, parameter: torch.Tensor, called: Callable[[torch.Tensor], object]) -> RemovableHandle:
        """Listen to backwards whose gradients are deferred, too."""
        return self._sharding.on_gradient(parameter, called)

    def engine_drop_unfinished(self) -> None:
        """Have units begin anew."""
        self._sharding.drop_unfinished()

    def engine_check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients that wait on their rank."""
        self._sharding.check_sent(optimizer)

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        """Step the optimizer; no unit goes on with what it gathered before."""
        self._sharding.reshard()
        super().engine_step(optimizer, closure, **kwargs)

    def engine_teardown(self) -> None:
        """Release the modules; there are none where ranks were not arranged."""
        if "_sharding" in vars(self):
            self._sharding.close()

    def engine_worth_trying(
        self, module: torch.nn.Module, world_size: int
    ) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
        """Propose units, what becomes of them after forward, and when they are gathered."""
        return worth_trying(self.config, module, world_size)

    def engine_checkpoint_form(self) -> str | None:
        """Return which form checkpoints have unless the user names one."""
        return str(self.config.state_dict_type)

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe the shards."""
        self._sharding.reshard()
        return TensorState(
            modules, optimizers, rank=self.global_rank, world_size=self.world_size, mesh=self.device_mesh
        )

    def _units(self, module: torch.nn.Module) -> list[Unit]:
        """Form units of what is chosen and, without a policy, of what is left by bytes."""
        rest = [] if self.config.auto_wrap_policy is not None else find_units(module, self.config.unit_bytes)
        return with_chosen(module, self._chosen(module), rest)

    def _chosen(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """List what users have wrapped or their policy chooses."""
        policy = self.config.auto_wrap_policy
        by_policy = [] if policy is None else chosen_by(policy, module)
        return list(dict.fromkeys([*self._by_hand.of(module), *by_policy]))
