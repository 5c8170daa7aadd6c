"""The loops of step_overhead.py as people write them by hand, one for each engine, on the engine's own words alone."""

from __future__ import annotations

import functools
from typing import Any

import loops
import torch
import torch.distributed as dist
from loops import CLIP
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Batch = tuple[torch.Tensor, torch.Tensor]
RATE = 1e-3
adamw = functools.partial(torch.optim.AdamW, lr=RATE)


class Raw(loops.Raw):
    """One step of an engine whose gradients torch's own ``clip_grad_norm_`` understands."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(self.wrapped(module), adamw, clip=True)

    def wrapped(self, module: nn.Module) -> Any:
        raise NotImplementedError


class RawDDP(Raw):
    def wrapped(self, module: nn.Module) -> Any:
        return DistributedDataParallel(module, gradient_as_bucket_view=True)


class RawFSDP(Raw):
    def wrapped(self, module: nn.Module) -> Any:
        return fully_shard(module)


class RawFSDPPerBlock(Raw):
    def wrapped(self, module: nn.Module) -> Any:
        for block in module.blocks:
            fully_shard(block)
        return fully_shard(module)


class RawTP(Raw):
    """The feed-forward layers of torch's own transformer layers are split, as under our default plan."""

    tensor_ranks = 2

    def wrapped(self, module: nn.Module) -> Any:
        sizes = dist.get_world_size() // self.tensor_ranks, self.tensor_ranks
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
        for block in module.blocks:
            parallelize_module(block, self.mesh["tensor"], plan)
        return fully_shard(module, mesh=self.mesh["data"])

    def clip(self) -> None:
        """Clip by hand: ``clip_grad_norm_`` refuses parameters on several meshes."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        split, whole = [], []
        for each in gradients:
            (split if each.device_mesh.ndim == 2 and each.placements[1].is_shard() else whole).append(each.to_local())
        squares = torch.stack([torch.nn.utils.get_total_norm(each) ** 2 for each in (split, whole)])
        dist.all_reduce(squares, group=self.mesh.get_group("data"))
        dist.all_reduce(squares[0], group=self.mesh.get_group("tensor"))
        factor = (CLIP / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)
        for each in (*split, *whole):
            each.mul_(factor)


class RawDeepSpeed:
    """DeepSpeed drives everything, clipping included."""

    stage = 1

    def __init__(self, module: nn.Module) -> None:
        import deepspeed

        settings = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": self.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        optimizer = torch.optim.AdamW(module.parameters(), lr=RATE)
        self.engine = deepspeed.initialize(
            model=module, optimizer=optimizer, config=settings, dist_init_required=False
        )[0]

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        loss = self.engine(*batch)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


class RawDeepSpeedStage2(RawDeepSpeed):
    stage = 2


class RawDeepSpeedStage3(RawDeepSpeed):
    stage = 3


class RawXLAFSDP(Raw):
    """Upstream's wrapper on the one CPU device of this process."""

    def wrapped(self, module: nn.Module) -> Any:
        import torch_xla
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

        return XlaFullyShardedDataParallel(module.to(torch_xla.device()))

    def step(self, *batch: torch.Tensor) -> torch.Tensor:
        import torch_xla

        loss = super().step(*batch)
        torch_xla.sync()
        return loss

    def clip(self) -> None:
        self.model.clip_grad_norm_(CLIP)


class RawXLASPMD(RawXLAFSDP):
    """Upstream's wrapper over all CPU devices of this process."""

    def wrapped(self, module: nn.Module) -> Any:
        import numpy
        import torch_xla
        import torch_xla.runtime
        from torch_xla.distributed.spmd import Mesh
        from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

        devices = torch_xla.runtime.global_runtime_device_count()
        mesh = Mesh(numpy.arange(devices), (devices, 1), ("fsdp", "model"))
        return SpmdFullyShardedDataParallel(module.to(torch_xla.device()), mesh=mesh, shard_output=lambda *_: None)

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
