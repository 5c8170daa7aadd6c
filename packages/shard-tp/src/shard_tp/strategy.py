"""Two-dimensional training: tensor parallelism inside groups of ranks, ``fully_shard`` (FSDP2) across them.

Norms and clipping are core's, in ``shard_core/gradients.py``: they follow from how ``DTensor``s are laid out.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from shard_core import SetupError, Strategy
from shard_core.backend import FullySharder, TensorState, TorchEngine, find_units, local_gradients, prepare_layers
from shard_core.plugins import DATA_AXIS, MeshShape
from shard_tp.config import TPConfig
from shard_tp.consistency import ConsistencyCheck, refuse_second_derivatives
from shard_tp.outputs import return_no_views
from shard_tp.plan import apply_plan, check_styles, own_plan, split_by
from shard_tp.plugin import TP
from shard_tp.tuning import worth_trying

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from shard_core.backend import LocalGradient, ParameterNames, TrainingState

TENSOR_AXIS: Final = "tensor_parallel"
"""The axis whose ranks share each layer and see the same data."""


class TPStrategy(TorchEngine, Strategy):
    """Splits layers over the ranks of a tensor-parallel group, and shards what they hold over data-parallel ranks.

    The ranks of a tensor-parallel group work on the same batch. What no plan names is whole in each
    group: its gradient is the same on all ranks of the group and counts once.

    Example:
        >>> TPStrategy(devices=4, tensor_parallel_size=2).config.tensor_parallel_size
        2
    """

    default_info = TP
    config_type = TPConfig
    config: TPConfig
    engine_minds_plain_backward = True
    _sharding: FullySharder
    _consistency: ConsistencyCheck
    _modules: weakref.WeakSet[torch.nn.Module]
    _trusted: weakref.WeakSet[torch.optim.Optimizer]

    def engine_check_options(self) -> None:
        """Check the plan, and that the sizes fit the ranks, where their number is known before any is started."""
        self._check_ranks()
        if self.config.plan != "auto":
            check_styles(self.config.plan)

    def _check_ranks(self) -> None:
        """Refuse sizes that do not fit the ranks before any is started, where their number is known."""
        axes = {DATA_AXIS: self.config.data_parallel_size, TENSOR_AXIS: self.config.tensor_parallel_size}
        devices = self.options.devices
        if isinstance(devices, int) and list(axes.values()) != ["auto", "auto"]:
            MeshShape(axes).fitted(devices * self.options.num_nodes)

    def engine_mesh(self) -> DeviceMesh:
        """Arrange hosts along the data axis and the ranks of a host along the tensor axis, unless options differ."""
        data, tensor = self.config.data_parallel_size, self.config.tensor_parallel_size
        if data == tensor == "auto":
            tensor = self.local_world_size
        mesh = MeshShape({DATA_AXIS: data, TENSOR_AXIS: tensor}).build(self.root_device.type, self.options.timeout)
        # Made on the rank they serve: what they hold cannot travel there with the strategy.
        self._sharding = FullySharder(
            mesh[DATA_AXIS],
            self.collectives,
            units=functools.partial(find_units, unit_bytes=self.config.unit_bytes),
            reshard_after_forward=self.config.reshard_after_forward,
        )
        self._consistency = ConsistencyCheck(mesh[TENSOR_AXIS], self.collectives, self.root_device)
        self._modules, self._trusted = weakref.WeakSet(), weakref.WeakSet()
        return mesh

    def engine_init_context(self, empty_init: bool) -> contextlib.AbstractContextManager[None]:
        """Record what constructors do instead of doing it; setup replays it shard by shard."""
        return self._sharding.recording(empty_init)

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Split the module, shard the parts, fill them with their values."""
        prepare_layers(module, self.config)
        policy, device = self.precision.policy, self.root_device
        self._sharding.shard(module, optimizers, names, policy=policy, device=device, lay_out=self._split)
        if self.config.check_batches and self._tensor_mesh.size() > 1:
            module.register_forward_pre_hook(self._check_batch, prepend=True, with_kwargs=True)
        self._modules.add(module)
        return module

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients without a message between data-parallel ranks."""
        return self._sharding.deferred(module)

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd; what earlier micro-batches deferred must still be there."""
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
        """Step the optimizer; the first time, see that what is whole in a group has one gradient there."""
        self._sharding.reshard()
        if closure is None and optimizer not in self._trusted and self._tensor_mesh.size() > 1:
            self._consistency.check_gradients(self._named_gradients(optimizer))
            self._trusted.add(optimizer)
        super().engine_step(optimizer, closure, **kwargs)

    def engine_teardown(self) -> None:
        """Release the modules; there are none where ranks were not arranged."""
        if "_sharding" in vars(self):
            self._sharding.close()

    def engine_worth_trying(
        self, module: torch.nn.Module, world_size: int
    ) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
        """Propose sizes of groups, and of units in them."""
        return worth_trying(self.config, module, world_size)

    def engine_checkpoint_form(self) -> str | None:
        """Return which form checkpoints have unless the user names one."""
        return "sharded" if self.config.save_distributed_checkpoint else "full"

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe the shards of both axes."""
        self._sharding.reshard()
        return TensorState(
            modules, optimizers, rank=self.global_rank, world_size=self.world_size, mesh=self.device_mesh
        )

    @property
    def _tensor_mesh(self) -> DeviceMesh:
        assert self.device_mesh is not None
        return self.device_mesh[TENSOR_AXIS]

    def _split(self, module: torch.nn.Module) -> None:
        """Distribute a module over the ranks of its group."""
        mesh, by_hand = self._tensor_mesh, self.config.parallelize_fn
        if by_hand is not None:
            split_by(lambda: _in_place(by_hand(module, mesh), module), module, mesh)
        elif self.config.plan != "auto":
            apply_plan(module, self.config.plan, mesh)
        elif mesh.size() > 1:
            apply_plan(module, own_plan(module, mesh.size()), mesh)
        if mesh.size() > 1:
            return_no_views(module)
            refuse_second_derivatives(module)

    def _check_batch(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        self._consistency.check_batch((args, kwargs))

    def _named_gradients(self, optimizer: torch.optim.Optimizer) -> dict[str, LocalGradient]:
        names = {id(p): name for module in self._modules for name, p in module.named_parameters()}
        stepped = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        return dict(zip((names[id(p)] for p in stepped), local_gradients(stepped), strict=True))


def _in_place(result: object, module: torch.nn.Module) -> None:
    """Refuse another module than the one that was to be split: it would be thrown away."""
    if result is not None and result is not module:
        raise SetupError(
            f"parallelize_fn returned {result!r:.60}; let it split the model it is given in place, and return that or "
            "nothing."
        )
