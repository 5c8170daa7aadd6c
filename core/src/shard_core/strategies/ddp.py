"""Data parallel training on torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shard_core._versions import buffers_sent_count_as_changed
from shard_core.checkpoint.tensor_state import TensorState
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import InvalidOption, MissingCapability, SetupError
from shard_core.parameters import plain_name
from shard_core.replicas import send_values
from shard_core.strategies.config import DDPConfig
from shard_core.strategies.plugin import DDP
from shard_core.strategy import Strategy
from shard_core.strategy.torch_engine import TorchEngine

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.checkpoint.state import TrainingState
    from shard_core.collectives.interface import Collectives
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
    _ran: weakref.WeakSet[torch.nn.Module]
    _trained: weakref.WeakKeyDictionary[torch.nn.Module, list[tuple[str, torch.nn.Parameter]]]

    def engine_collectives(self, name: str | None) -> Collectives:
        """Talk through a process group."""
        if name not in (None, "process_group"):
            raise InvalidOption(f"strategy 'ddp' has no collectives {name!r}; it has: 'process_group'.")
        return ProcessGroupCollectives(
            self.options.process_group_backend, self.options.timeout, self.options.guard_timeout
        )

    def engine_mesh(self) -> DeviceMesh | None:
        """Need no mesh: every rank sees its own data."""
        # Made on the rank it serves: weak references cannot travel there with the strategy.
        self._ran = weakref.WeakSet()
        self._trained = weakref.WeakKeyDictionary()
        return None

    def engine_init_context(self, empty_init: bool) -> contextlib.AbstractContextManager[None]:
        """Build as plain PyTorch does, on every rank."""
        del empty_init
        return contextlib.nullcontext()

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Move the module to the device and wrap it; rank 0's values go to all ranks."""
        module.to(self.root_device)
        names.repoint(optimizers, module)
        if not any(parameter.requires_grad for parameter in module.parameters()):
            # DistributedDataParallel refuses a module without gradients; there is nothing to average.
            send_values(module)
            return module
        wrapped = DistributedDataParallel(
            module,
            device_ids=[self.root_device] if self.root_device.type == "cuda" else None,
            **_arguments(self.config),
        )
        wrapped.register_forward_hook(self._note_forward)
        if self.config.broadcast_buffers and buffers_sent_count_as_changed():
            send_values(module)
            wrapped.register_forward_pre_hook(_send_buffers)
        self._trained[wrapped] = [(plain_name(name), p) for name, p in module.named_parameters() if p.requires_grad]
        return wrapped

    def _note_forward(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        del args, output
        self._ran.add(module)

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd; what did not run through the wrapper's forward would not be averaged."""
        if isinstance(module, DistributedDataParallel) and module not in self._ran:
            raise MissingCapability(
                "strategy 'ddp' does not promise ENTRY_METHODS: this loss did not come through the module that setup "
                "returned, so its gradients would stay on their rank; call that module, not a method of unwrap(module)."
            )
        self._ran.discard(module)
        super().engine_backward(loss, module, **kwargs)
        if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync:
            self._refuse_unreached(module)

    def _refuse_unreached(self, module: DistributedDataParallel) -> None:
        """Stop before a step with gradients that stayed on their rank: a message waits for all of its parameters."""
        if self.config.find_unused_parameters or self.config.static_graph:
            return
        unreached = [name for name, parameter in self._trained[module] if parameter.grad is None]
        if unreached:
            raise SetupError(
                "strategy 'ddp' can only average gradients of a loss that reaches every trained parameter; this one "
                f"did not reach {len(unreached)} of them, first {unreached[0]!r}; freeze those with "
                "requires_grad_(False) before setup, or pass find_unused_parameters=True if other steps use them."
            )

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Let gradients add up locally."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    def engine_worth_trying(
        self, module: torch.nn.Module, world_size: int
    ) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
        """Name sizes of messages, up to one that holds all gradients."""
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


def _arguments(config: DDPConfig) -> dict[str, Any]:
    """Spell the options as this torch's DistributedDataParallel wants them."""
    arguments = dataclasses.asdict(config)
    if buffers_sent_count_as_changed():
        arguments["broadcast_buffers"] = False  # they are sent beside the wrapper
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers")
    return arguments


def _send_buffers(module: torch.nn.Module, args: Any) -> None:
    """Give every rank rank 0's buffers, unnoticed by backwards of earlier forwards, which may still read them."""
    del args
    for buffer in module.buffers():
        dist.broadcast(buffer.data, src=0)
