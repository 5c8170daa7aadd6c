"""The same loop in other libraries' words; each is run only where the library is installed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from loops import CLIP
from raw_loops import RATE
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def check_sharded(model: nn.Module) -> None:
    """Refuse to time a library that keeps whole parameters on every rank."""
    parameters = list(model.parameters())
    held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
    assert held <= 0.6 * sum(p.numel() for p in parameters), "this library does not shard here"
    assert dist.get_world_size() == 2


class FabricLoop:
    """Lightning Fabric's ``ModelParallelStrategy``, sharded per block as its documentation shows."""

    needs = "lightning"

    def __init__(self, module: nn.Module) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        def shard_blocks(model: Any, mesh: Any) -> Any:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            return fully_shard(model, mesh=mesh["data_parallel"])

        strategy = ModelParallelStrategy(shard_blocks, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1)
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
        self.fabric.launch()
        self.model = self.fabric.setup(module)
        self.optimizer = self.fabric.setup_optimizers(torch.optim.AdamW(self.model.parameters(), lr=RATE))
        check_sharded(self.model)

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(*batch)
        self.fabric.backward(loss)
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class AccelerateLoop:
    """Accelerate's FSDP2, sharded per block as its default policy does for models that name their blocks."""

    needs = "accelerate"

    def __init__(self, module: nn.Module) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import DistributedType

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        )
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        # On CPUs it would ignore the plugin without a word, and train data parallel.
        self.accelerator.state.distributed_type = DistributedType.FSDP
        self.accelerator.state.fsdp_plugin = plugin
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        self.model, self.optimizer = self.accelerator.prepare(module, optimizer)
        check_sharded(self.model)

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self.model(*batch)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


LIBRARIES = {"Lightning Fabric": FabricLoop, "Accelerate FSDP2": AccelerateLoop}
