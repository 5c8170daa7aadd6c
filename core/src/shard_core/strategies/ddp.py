"""Data parallel training on torch's DistributedDataParallel."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import weakref
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from shard_core._versions import buffers_sent_count_as_changed
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import InvalidOption, MissingCapability, SetupError
from shard_core.parameters import plain_name
from shard_core.replicas import send_values
from shard_core.strategies.config import DDPConfig
from shard_core.strategies.plugin import DDP
from shard_core.strategy import Strategy
from shard_core.strategy.torch_engine import TorchEngine

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.collectives.interface import Collectives
    from shard_core.parameters import ParameterNames


@dataclasses.dataclass
class _Passes:
    """The forwards and backwards of one wrapper, which gets ready in each forward to send gradients in one backward.

    Attributes:
        forwards: How many forwards may still have a backward.
        sends: Whether the wrapper sends gradients in the next backward.
        reached: Whether the backward at hand has come to its parameters.
    """

    forwards: int = 0
    sends: bool = False
    reached: bool = False

    def note_forward(self, module: DistributedDataParallel, args: Any, output: Any) -> None:
        """Count a forward, as the wrapper's forward hook."""
        del args, output
        if torch.is_grad_enabled():
            self.forwards += 1
            self.sends |= module.require_backward_grad_sync

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Record that the backward has reached a parameter, as its hook."""
        del parameter
        self.reached = True


class DDPStrategy(TorchEngine, Strategy):
    """Keeps a whole copy of the module on every rank and averages gradients while backward runs.

    Example:
        >>> DDPStrategy(devices=2, bucket_cap_mb=10).config.bucket_cap_mb
        10
    """

    default_info = DDP
    config_type = DDPConfig
    engine_keeps_quantized = True
    config: DDPConfig
    _passes: weakref.WeakKeyDictionary[DistributedDataParallel, _Passes]
    _trained: weakref.WeakKeyDictionary[DistributedDataParallel, dict[str, torch.nn.Parameter]]
    _hooks: list[RemovableHandle]

    def engine_collectives(self, name: str | None) -> Collectives:
        """Create collectives over a process group."""
        if name not in (None, "process_group"):
            raise InvalidOption(f"strategy 'ddp' has no collectives {name!r}; it has: 'process_group'.")
        return ProcessGroupCollectives(
            self.options.process_group_backend, self.options.timeout, self.options.guard_timeout
        )

    def engine_mesh(self) -> DeviceMesh | None:
        """Return no mesh: every rank sees its own data."""
        # Made on the rank it serves: weak references cannot travel there with the strategy.
        self._passes = weakref.WeakKeyDictionary()
        self._trained = weakref.WeakKeyDictionary()
        self._hooks = []
        return None

    def engine_init_context(self, empty_init: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context that does nothing: every rank builds as plain PyTorch does."""
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
        trained = {plain_name(name): p for name, p in module.named_parameters() if p.requires_grad}
        self._trained[wrapped] = trained
        self._passes[wrapped] = passes = _Passes()
        wrapped.register_forward_hook(passes.note_forward)
        # Where every loss reaches every parameter, a hook on one of them is enough.
        for parameter in list(trained.values())[: None if self._may_leave_out else 1]:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(passes.note_gradient))
        if self.config.broadcast_buffers and buffers_sent_count_as_changed():
            send_values(module)
            wrapped.register_forward_pre_hook(_send_buffers)
        return wrapped

    @property
    def _may_leave_out(self) -> bool:
        return self.config.find_unused_parameters or self.config.static_graph

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd, and average what the wrappers do not send: gradients of a second backward after one forward."""
        if isinstance(module, DistributedDataParallel):
            passes = self._passes[module]
            if not passes.forwards:
                raise MissingCapability(
                    "strategy 'ddp' does not promise ENTRY_METHODS: this loss did not come through the module that "
                    "setup returned, whose every forward has had its backward; call that module, not a method of "
                    "unwrap(module), or give the earlier backward retain_graph=True if both losses are of one forward."
                )
            passes.forwards -= not kwargs.get("retain_graph")
        super().engine_backward(loss, module, **kwargs)
        # The loss may have come through several modules.
        for wrapped, passes in self._passes.items():
            if not passes.reached and wrapped is not module:
                continue
            sent, passes.sends, passes.reached = passes.sends, False, False
            if not wrapped.require_backward_grad_sync:
                continue
            if sent:
                self._refuse_unreached(wrapped)
            else:
                _average(list(self._trained[wrapped].values()))

    def _refuse_unreached(self, wrapped: DistributedDataParallel) -> None:
        """Refuse a step with gradients that stayed on their rank: a bucket waits for all of its parameters."""
        if self._may_leave_out:
            return
        unreached = [name for name, parameter in self._trained[wrapped].items() if parameter.grad is None]
        if unreached:
            raise SetupError(
                "strategy 'ddp' can only average gradients of a loss that reaches every trained parameter; this one "
                f"did not reach {len(unreached)} of them, first {unreached[0]!r}; freeze those with "
                "requires_grad_(False) before setup, add up losses of one forward that reach different ones, or pass "
                "find_unused_parameters=True if other steps use them."
            )

    def engine_teardown(self) -> None:
        """Remove the hooks from parameters: another strategy would take them for the user's."""
        for hook in self._hooks:
            hook.remove()

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which gradients add up locally."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

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


def _arguments(config: DDPConfig) -> dict[str, Any]:
    """Return the options as this torch's DistributedDataParallel names them."""
    arguments = dataclasses.asdict(config)
    if buffers_sent_count_as_changed():
        arguments["broadcast_buffers"] = False  # they are sent by a hook of ours
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
        arguments["forward_sync_buffers"] = arguments.pop("broadcast_buffers")
    return arguments


@torch.no_grad()
def _average(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Average gradients over ranks; what was averaged before stays, so sums over backwards come out right."""
    reached = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    reached = reached.to(parameters[0].device)
    dist.all_reduce(reached, op=dist.ReduceOp.MAX)
    messages = []
    for parameter, anywhere in zip(parameters, reached.tolist(), strict=True):
        if anywhere:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            messages.append(dist.all_reduce(parameter.grad.div_(dist.get_world_size()), async_op=True))
    for message in messages:
        message.wait()


def _send_buffers(module: torch.nn.Module, args: Any) -> None:
    """Broadcast rank 0's buffers, unnoticed by backwards of earlier forwards, which may still read them."""
    del args
    for buffer in module.buffers():
        dist.broadcast(buffer.data, src=0)
