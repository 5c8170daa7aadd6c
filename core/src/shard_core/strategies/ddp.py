"""Data parallel training on torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.data_parallel.ddp_modules import DDPModules
from shard_core.preparation.layers import prepare_layers
from shard_core.preparation.replacement_check import ReplacementCheck
from shard_core.strategies.config import DDPConfig
from shard_core.strategies.plugin import DDP
from shard_core.strategy import Strategy
from shard_core.strategy.torch_engine import TorchEngine

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.parameters import ParameterNames


class DDPStrategy(TorchEngine, Strategy):
    """Keeps a whole copy of the module on every rank and averages gradients while backward runs.

    Example:
        >>> DDPStrategy(devices=2, bucket_cap_mb=10).config.bucket_cap_mb
        10
    """

    default_info = DDP
    config_type = DDPConfig
    config: DDPConfig
    engine_takes_sparse_gradients = True

    @functools.cached_property
    def _ddp(self) -> DDPModules:
        return DDPModules(
            self.root_device,
            bucket_cap_mb=self.config.bucket_cap_mb,
            find_unused_parameters=self.config.find_unused_parameters,
            gradient_as_bucket_view=self.config.gradient_as_bucket_view,
            static_graph=self.config.static_graph,
            broadcast_buffers=self.config.broadcast_buffers,
        )

    @functools.cached_property
    def _placed(self) -> list[ReplacementCheck]:
        return []

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Move the module to the device and wrap it; rank 0's values go to all ranks."""
        prepare_layers(module, self.config)
        module.to(self.root_device)
        names.repoint(optimizers, module)
        self._placed.append(ReplacementCheck(module))
        return self._ddp.wrap(module)

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd, and average what the wrappers do not send."""
        with self._explained():
            self._ddp.backward(loss, module, **kwargs)

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        """Step, and send the buffers that forwards have changed, for evaluations on one rank alone."""
        with self._explained():
            super().engine_step(optimizer, closure, **kwargs)
        self._ddp.send_changed(optimizer)

    def engine_skip_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Send those buffers where no step is taken, too."""
        self._ddp.send_changed(optimizer)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Look, once torch has failed, whether a parameter is no more what it was at setup, and say that instead."""
        try:
            yield
        except RuntimeError:
            for placed in self._placed:
                placed.check_shapes()
                placed.check_held()
            raise

    def engine_drop_unfinished(self) -> None:
        """Have the wrappers begin anew."""
        self._ddp.drop_unfinished()

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients add up locally."""
        return self._ddp.no_sync(module)

    def engine_check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients that were left on their rank, and those of a backward that has yet to average."""
        self._ddp.check_averaged(optimizer)

    def engine_teardown(self) -> None:
        """Remove the hooks from parameters, and drop what holds the modules: it cannot travel to other ranks."""
        self._ddp.teardown()
        del self._ddp
        vars(self).pop("_placed", None)

    def engine_worth_trying(
        self, module: torch.nn.Module, world_size: int
    ) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
        """Yield sizes of buckets, up to one that holds all gradients."""
        if world_size == 1:
            return
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        mebibytes = sum(each.numel() * each.element_size() for each in trained) / 2**20
        own = self.config.bucket_cap_mb
        sizes = [size for size in (1, 5, 25, 100, 400) if size < mebibytes and size != own]
        if own < mebibytes:
            sizes.append(math.ceil(mebibytes))
        best = yield [{"bucket_cap_mb": size} for size in sizes]
        yield [{**best, "gradient_as_bucket_view": not self.config.gradient_as_bucket_view}]

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe whole tensors, which ranks write in turn."""
        return TensorState(modules, optimizers, rank=self.global_rank, world_size=self.world_size)
