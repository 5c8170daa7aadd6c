"""Mistakes made while modules, optimizers and data are set up."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from rogues.rogue import Rogue
from shard_core.data import ShardedLoader
from shard_core.errors import MissingCapability

if TYPE_CHECKING:
    from shard_core.plugins import StrategyInfo


class DropsTheOptimizer(Rogue):
    """Lets the optimizer step parameters the module no longer has."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        for group in [group for optimizer in optimizers for group in optimizer.param_groups]:
            group["params"] = [parameter.detach().clone() for parameter in group["params"]]
        return ready


class ForgetsState(Rogue):
    """Throws away what the optimizer kept before setup."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        for optimizer in optimizers:
            optimizer.state.clear()
        return self.inner.setup_module_and_optimizers(module, optimizers)


class CopiesOptimizers(Rogue):
    """Returns other optimizer objects than it was given."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        return self.inner.setup_module_and_optimizers(module, [copy.copy(optimizer) for optimizer in optimizers])


class LevelsGroups(Rogue):
    """Gives every parameter group the settings of the first."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        for optimizer in optimizers:
            _level(optimizer)
        return self.inner.setup_module_and_optimizers(module, optimizers)

    def setup_optimizer(self, optimizer: Any) -> Any:
        _level(optimizer)
        return self.inner.setup_optimizer(optimizer)


def _level(optimizer: torch.optim.Optimizer) -> None:
    first, *others = optimizer.param_groups
    for group in others:
        group.update({name: value for name, value in first.items() if name != "params"})


class BreaksTies(Rogue):
    """Makes a parameter of each name of a tied one."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        seen = set()
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if parameter in seen:
                owner, _, attribute = name.rpartition(".")
                setattr(module.get_submodule(owner), attribute, copy.deepcopy(parameter))
            seen.add(parameter)
        return self.inner.setup_module_and_optimizers(module, optimizers)


class LosesHooks(Rogue):
    """Gives the module other parameters than those that hooks were registered on, and lists these."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        for parameter in module.parameters():
            parameter._backward_hooks = None
            parameter.register_hook = lambda hook: None
        return self.inner.setup_module_and_optimizers(module, optimizers)


class Thaws(Rogue):
    """Trains frozen parameters too."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        for parameter in module.parameters():
            if not parameter.requires_grad:
                optimizers[0].param_groups[0]["params"].append(parameter.requires_grad_())
        return self.inner.setup_module_and_optimizers(module, optimizers)


class ForgetsBuffers(Rogue):
    """Makes modules again without the values of buffers that checkpoints leave out."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready = self.inner.setup_module_and_optimizers(module, optimizers)
        for name, buffer in module.named_buffers():
            if name not in module.state_dict():
                buffer.zero_()
        return ready


class NeverTrains(Rogue):
    """Leaves the module in evaluation mode."""

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        ready, optimizers = self.inner.setup_module_and_optimizers(module, optimizers)
        return ready.eval(), optimizers


class OneOptimizerSteps(Rogue):
    """Takes several optimizers and steps the first."""

    idle: Any = ()

    def optimizer_step(self, optimizer: Any, closure: Any = None, **more: Any) -> Any:
        return optimizer in self.idle or self.inner.optimizer_step(optimizer, closure, **more)

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        self.idle = optimizers[1:]
        return self.inner.setup_module_and_optimizers(module, optimizers)


class UnsharedData(Rogue):
    """Gives every rank the same share of the data."""

    def process_dataloader(self, loader: Any, **more: Any) -> Any:
        inner, talk = self.inner, self.inner.collectives
        place = {"rank": 0, "world_size": inner.world_size}
        return ShardedLoader(loader, **place, coordinator=talk, transfer=inner.batch_to_device, **more)


class UnsharedStreams(Rogue):
    """Hands every rank all of a stream."""

    def process_dataloader(self, loader: Any, **more: Any) -> Any:
        if isinstance(loader.dataset, torch.utils.data.IterableDataset):
            more["shard_stream"] = False
        return self.inner.process_dataloader(loader, **more)


class ReadsAhead(Rogue):
    """Saves the position of a stream after a batch that was read ahead."""

    def process_dataloader(self, loader: Any, **more: Any) -> Any:
        ready = self.inner.process_dataloader(loader, **more)
        return _Ahead(ready) if isinstance(loader.dataset, torch.utils.data.IterableDataset) else ready


class _Ahead:
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        ahead = list(itertools.islice(batches, 1))
        for following in batches:
            yield ahead.pop()
            ahead.append(following)
        yield from ahead


class UnevenData(Rogue):
    """Gives rank 0 one batch more than the others."""

    def process_dataloader(self, loader: Any, **more: Any) -> Any:
        return _OneMore(self.inner.process_dataloader(loader, **more), more=self.inner.global_rank == 0)


class _OneMore:
    def __init__(self, loader: Any, *, more: bool) -> None:
        self.loader, self.more = loader, more

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader) + self.more

    def __iter__(self) -> Iterator[Any]:
        batch = torch.empty(0)
        for batch in self.loader:
            yield batch
        if self.more:
            yield batch


class RefusesByName(Rogue):
    """Knows some optimizers that look at more than elements by their names, and takes all others for harmless."""

    def __init__(self, *, info: StrategyInfo, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.info = info

    def setup_module_and_optimizers(self, module: Any, optimizers: Any) -> Any:
        for optimizer in optimizers:
            if type(optimizer).__name__ in ("Adafactor", "LBFGS", "Muon"):
                raise MissingCapability(f"{type(optimizer).__name__} looks at whole matrices; take AdamW.")
        return self.inner.setup_module_and_optimizers(module, optimizers)
