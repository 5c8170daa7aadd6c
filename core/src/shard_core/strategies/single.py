"""One process on one device: plain PyTorch under the common interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.collectives.single import SingleCollectives
from shard_core.preparation.layers import prepare_layers
from shard_core.strategies.config import SingleConfig
from shard_core.strategies.plugin import SINGLE
from shard_core.strategy import Strategy
from shard_core.strategy.torch_engine import TorchEngine

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.parameters import ParameterNames


class SingleStrategy(TorchEngine, Strategy):
    """Trains on one device without torch.distributed; what every other strategy is compared with.

    Example:
        >>> import torch
        >>> strategy = SingleStrategy(accelerator="cpu")
        >>> model = torch.nn.Linear(2, 1)
        >>> model, (optimizer,) = strategy.setup_module_and_optimizers(
        ...     model, [torch.optim.SGD(model.parameters(), lr=0.1)]
        ... )
        >>> strategy.backward(model(torch.ones(4, 2)).mean(), model)
        >>> strategy.optimizer_step(optimizer)
        True
        >>> strategy.teardown()
    """

    default_info = SINGLE
    config_type = SingleConfig
    config: SingleConfig
    engine_minds_plain_backward = True
    engine_takes_sparse_gradients = True
    engine_collectives_types = {"single": SingleCollectives}
    engine_backward_keywords = ("gradient", "retain_graph", "create_graph", "inputs")

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Move the module to the device."""
        prepare_layers(module, self.config)
        module.to(self.root_device)
        names.repoint(optimizers, module)
        return module

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe whole tensors."""
        return TensorState(modules, optimizers, rank=0, world_size=1)
