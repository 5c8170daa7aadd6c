"""Data parallel training with DeepSpeed's ZeRO."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shard_core import SetupError, Strategy, UnsupportedPrecision
from shard_core.backend import (
    LocalGradient,
    check_used_alike,
    fast_step,
    inside_step,
    make_contiguous,
    prepare_layers,
    send_values,
    total_norm,
)
from shard_deepspeed import _versions
from shard_deepspeed.checkpoint import ZeroState
from shard_deepspeed.config import DeepSpeedConfig
from shard_deepspeed.config.inert import inert_options
from shard_deepspeed.engine_config import check_honoured, engine_config
from shard_deepspeed.own_device import accelerator, environment, own_device
from shard_deepspeed.plugin import DEEPSPEED
from shard_deepspeed.precision import check_float16, scaled_precision
from shard_deepspeed.tuning import worth_trying
from shard_deepspeed.zero import UnevenCalls, ZeroModule, fill_frozen, is_trained

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from shard_core.backend import FlatPart, ParameterNames, Precision, TrainingState

log = logging.getLogger(__name__)

#: How torch, or DeepSpeed where nothing else has a gradient of the parameter, refuses one of no elements.
_READ_OUTSIDE = ("expected shape compatible with", "Cannot reduce scatter gradients whose size is not same")
#: How torch refuses to compute with a parameter that stage 3 has let go.
_READS_NOTHING = (
    *("is invalid for input of size 0", "size of tensor a (0)", "size of tensor b (0)"),
    "must match the existing size (0)",  # a norm
    "cannot create std::vector larger than max_size()",  # a convolution's kernel
    "recomputed metadata: {'shape': torch.Size([0])",  # activation checkpointing
)


class DeepSpeedStrategy(Strategy):
    """Shards optimizer state, gradients and parameters over all ranks, as far as the stage says.

    DeepSpeed shards, averages and gathers; clipping, scaling and the step itself are the same as under
    every other strategy, taken by the user's own optimizer on this rank's part of each parameter.

    Example:
        >>> DeepSpeedStrategy(devices=2, stage=3).config.zero_stage
        3
    """

    default_info = DEEPSPEED
    config_type = DeepSpeedConfig
    config: DeepSpeedConfig
    engine_minds_plain_backward = True
    _zero: dict[torch.nn.Module, ZeroModule]
    _environment: contextlib.ExitStack

    def engine_precision(self, precision: Precision) -> Precision:
        """Have losses multiplied by the factor that options say, where the precision scales them."""
        return scaled_precision(self.config, precision, own=precision is self.options.precision)

    def engine_check_options(self) -> None:
        """Check that the stage keeps parameters in the precision's dtype."""
        policy, stage = self.precision.policy, self.config.zero_stage
        honoured = ("float32", "bfloat16", "float16") if stage else ("float32",)
        if policy.parameter not in honoured:
            raise UnsupportedPrecision(
                f"strategy {self.info.name!r} at stage {stage} does not honour precision {policy.name!r}: it keeps "
                f"parameters in {' or '.join(honoured)}, not in {policy.parameter}; take '32-true' or 'bf16-mixed'."
            )

    def engine_mesh(self) -> DeviceMesh | None:
        """Return no mesh: every rank sees its own data; say which options do nothing."""
        if self.precision.policy.parameter == "float16":
            check_float16(self.root_device)
        if self.is_global_zero:
            for name, reason in inert_options(self.config, scaled=self.precision.scaler is not None).items():
                log.warning("%s is %r, which does nothing %s.", name, getattr(self.config, name), reason)
        # Made on the rank it serves: what it holds cannot travel there with the strategy.
        self._zero = {}
        self._environment = contextlib.ExitStack()
        return None

    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Pass the module's parameters to an engine, and optimizers this rank's partitions of them."""
        _check_real(module)
        self._check_tested(optimizers)
        prepare_layers(module, self.config)
        module.to(self.root_device)
        make_contiguous(module)
        send_values(module)
        trained = [parameter for parameter in module.parameters() if is_trained(parameter)]
        if trained:
            norm = functools.partial(_norm, weakref.ref(self), weakref.ref(module))
            uneven = self._compare_calls(module, sum(parameter.numel() for parameter in trained))
            engine = self._initialize(module, trained)
            self._zero[module] = ZeroModule(
                module, engine, self.global_rank, norm=norm, uneven=uneven, collectives=self.collectives
            )
        for optimizer in optimizers:
            self.engine_add_optimizer(module, optimizer, names)
        return module

    def _check_tested(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Check that DeepSpeed lists optimizers as tested, where users take no others."""
        if self.config.zero_allow_untested_optimizer or not self.config.zero_stage:
            return
        _versions.import_deepspeed(self.root_device.type)
        tested = _versions.tested_optimizers()
        for optimizer in optimizers:
            if type(optimizer) not in tested:
                raise SetupError(
                    f"{type(optimizer).__name__} is no optimizer that DeepSpeed lists as tested with ZeRO, and "
                    "zero_allow_untested_optimizer is False; leave it at True, with which optimizers that work element "
                    f"by element train right, or take one of {', '.join(sorted({each.__name__ for each in tested}))}."
                )

    @property
    def _advice(self) -> str:
        """What users may do where ranks use different layers, beside what they may do everywhere."""
        return "take overlap_comm=False, " if self.config.zero_stage == 1 else ""

    def _compare_calls(self, module: torch.nn.Module, trained: int) -> UnevenCalls:
        """Have ranks compare what they come to, from before DeepSpeed registers its hooks."""
        config = self.config
        # On another device the host would wait for it before each layer.
        compares = self.world_size > 1 and self.root_device.type == "cpu"
        early = config.zero_stage > 1 or (config.zero_stage == 1 and config.overlap_comm)
        uneven = UnevenCalls(
            module,
            self.collectives,
            gathers=compares and config.zero_stage == 3,
            sends=compares and early and trained > config.reduce_bucket_size,
            advice=self._advice,
        )
        uneven.watch_gradients()
        self._environment.callback(uneven.close)  # also if there will be no engine
        return uneven

    def _initialize(self, module: torch.nn.Module, trained: list[torch.nn.Parameter]) -> Any:
        deepspeed = _versions.import_deepspeed(self.root_device.type)
        found = accelerator().device_name()
        if found != self.root_device.type:
            raise SetupError(
                f"DeepSpeed runs on one kind of device per process, here {found!r}, and this rank's is "
                f"{self.root_device.type!r}; start another process for it, or set DS_ACCELERATOR."
            )
        _versions.forget_dead_groups()
        self._environment.enter_context(own_device(self.root_device))
        # DeepSpeed wants an optimizer to shard for; the user's come later, one or several, and take the steps.
        stand_in = torch.optim.SGD(trained, lr=0.0)
        if self.config.zero_stage:
            for parameter in trained:  # before DeepSpeed registers its hooks, which read the gradient
                self._environment.callback(parameter.register_post_accumulate_grad_hook(fill_frozen).remove)
        ds_config = engine_config(self.config, self.precision.policy.parameter)
        # Read again at every step; without LOCAL_SIZE stage 3 on CPU starts a program to count devices each time.
        local_size = os.environ.get("LOCAL_WORLD_SIZE", "1")
        for name, value in (("LOCAL_RANK", str(self.local_rank)), ("LOCAL_SIZE", local_size)):
            self._environment.enter_context(environment(name, value))
        with (
            _versions.quiet(self.config.logging_level),
            _versions.no_compiler(deepspeed),
            _versions.one_dimension(module.parameters()),
        ):
            engine, *_ = deepspeed.initialize(model=module, optimizer=stand_in, config=ds_config)
        if engine.device.index not in (None, self.root_device.index):
            raise SetupError(f"DeepSpeed computes on {engine.device}, not on this rank's device, {self.root_device}.")
        engine.set_gradient_accumulation_boundary(True)
        check_honoured(engine, self.config)
        return engine

    def engine_add_optimizer(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> None:
        """Point the optimizer at this rank's partitions of the module's parameters."""
        self._check_tested([optimizer])
        if module in self._zero:
            self._zero[module].repoint(optimizer, names)
        else:
            names.repoint([optimizer], module)

    def engine_lay_out_state(self, parameter: torch.Tensor, slot: str, value: torch.Tensor) -> torch.Tensor:
        """Slice whole values to this rank's partitions."""
        for zero in self._zero.values():
            value = zero.lay_out(parameter, slot, value)
        return value

    @property
    def engine_defers_sync(self) -> bool:
        """Whether the stage leaves gradients whole until they are averaged: from stage 2 on they are sent as made."""
        return self.config.zero_stage < 2

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients locally."""
        return self._zero[module].deferred() if module in self._zero else contextlib.nullcontext()

    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run autograd, and average what it leaves; the loss may have come through several modules."""
        del module
        for zero in self._zero.values():
            zero.make_ready()
        with contextlib.ExitStack() as kept, self._translated():
            if kwargs.get("retain_graph"):
                for zero in self._zero.values():
                    kept.enter_context(zero.graph_kept())
            loss.backward(**kwargs)
        for zero in self._zero.values():
            zero.end_backward()
        check_used_alike([pair for zero in self._zero.values() for pair in zero.used()], self.collectives, self._advice)
        with self._translated():
            for zero in self._zero.values():
                zero.finish()

    def engine_drop_unfinished(self) -> None:
        """Throw away what parts have, and what DeepSpeed was about to send."""
        for zero in self._zero.values():
            zero.drop_gradients()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Explain autograd's errors about changed shapes of parameters that stage 3 gathers and releases."""
        try:
            yield
        except RuntimeError as error:
            if self.config.zero_stage == 3 and any(sign in str(error) for sign in _READS_NOTHING):
                raise SetupError(
                    "the graph of the loss reads parameters of which stage 3 has nothing any more: it holds a gradient "
                    "from torch.autograd.grad(..., create_graph=True), or one with retain_graph=True has come through "
                    "it before; take stage 1 or 2, or 'fsdp'."
                ) from error
            if self.config.zero_stage != 3 or not any(sign in str(error) for sign in _READ_OUTSIDE):
                raise
            raise SetupError(
                "the loss reads parameters outside the module's forward, where stage 3 has nothing of them; compute "
                "that part of the loss inside forward, take the optimizer's weight_decay for an L2 penalty, or take "
                "stage 1 or 2."
            ) from error

    def engine_gradients(self, optimizer: torch.optim.Optimizer) -> list[LocalGradient]:
        """Return the gradients of this rank's partitions."""
        return [gradient for zero in self._stepped_by(optimizer) for gradient in zero.gradients(optimizer)]

    def _norm(self, module: torch.nn.Module, name: str, gradient: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Compute the norm of a gradient over the ranks that hold its parts, as torch's functions clip by it."""
        if self.gradients_wait(module) or self._zero[module].waits:
            raise SetupError(
                "the norm of a gradient was asked for while gradients are yet to be averaged over ranks or divided by "
                "denominators; clip with strategy.clip_gradients_norm after the last backward of the step."
            )
        self.collectives.barrier(f"the norm of the gradient of {name!r}")
        return total_norm([LocalGradient(gradient, (dist.group.WORLD,))], norm_type, self.collectives)

    def engine_check_averaged(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients that wait on their rank."""
        for zero in self._stepped_by(optimizer):
            zero.check_averaged(optimizer)

    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        """Step this rank's parts and bring them to all ranks, inside of all hooks on the step, which see the module."""
        modules = self._stepped_by(optimizer)
        for zero in modules:
            zero.cut_state(optimizer)
        stepped: list[ZeroModule] = []

        def enter(*_: object) -> None:
            for zero in modules:
                zero.begin_step()
            stepped.extend(modules)

        def leave(*_: object) -> None:
            while stepped:
                stepped.pop().publish()

        def evaluate() -> Any:
            assert closure is not None
            for zero in modules:
                zero.publish()
            loss = closure()
            for zero in modules:
                zero.begin_step()  # as the closure's forward may have written, too
            return loss

        with (
            inside_step(optimizer, enter, leave),
            fast_step(optimizer, self.root_device) if closure is None else contextlib.nullcontext(),
        ):
            optimizer.step(evaluate if closure else None, **kwargs)

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> list[ZeroModule]:
        """List the modules an optimizer steps, everything that users may have done to either since taken in."""
        for zero in self._zero.values():
            zero.adopt(optimizer)
            zero.follow_gradients()
        return [zero for zero in self._zero.values() if zero.steps(optimizer)]

    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe this rank's parts."""
        sharded = [self._zero[module] for module in modules.values() if module in self._zero]
        for zero in sharded:
            zero.copy_writes()
            for optimizer in optimizers.values():
                zero.adopt(optimizer)
                zero.cut_state(optimizer)
        return ZeroState(
            modules,
            optimizers,
            rank=self.global_rank,
            world_size=self.world_size,
            sharded=sharded,
        )

    def engine_on_gradient(
        self, parameter: torch.Tensor, called: Callable[[torch.Tensor], object]
    ) -> RemovableHandle | None:
        """Listen at stage 0; from stage 1 on what ``loss.backward()`` leaves is refused, whatever it stands beside."""
        return None if self.config.zero_stage else super().engine_on_gradient(parameter, called)

    def engine_follow_gradients(self, module: torch.nn.Module) -> None:
        """Drop parts' gradients that the module's parameters show no more."""
        if module in self._zero:
            self._zero[module].follow_gradients()

    def engine_flat_parts(self, module: torch.nn.Module) -> Mapping[torch.Tensor, FlatPart]:
        """Return this rank's parts; at stage 0 there are none, all is whole on every rank."""
        return self._zero[module].parts() if module in self._zero else {}

    def engine_publish_parts(self, module: torch.nn.Module) -> None:
        """Copy parts to all ranks."""
        if module in self._zero:
            self._zero[module].publish()

    def engine_worth_trying(
        self, module: torch.nn.Module, world_size: int
    ) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
        """Propose sizes of messages, what stays whole, and whether messages overlap backward."""
        overlaps = self.options.accelerator != "cpu" and torch.cuda.is_available()
        return worth_trying(self.config, module, world_size, overlaps=overlaps)

    def engine_teardown(self) -> None:
        """Detach the engines from the modules."""
        for zero in self._zero.values():
            zero.close()
        self._zero.clear()
        self._environment.close()


def _check_real(module: torch.nn.Module) -> None:
    """Check that no parameter is complex: DeepSpeed goes on with its real part, and at stage 0 fails."""
    found = next((name for name, each in module.named_parameters() if each.is_complex()), None)
    if found is not None:
        raise SetupError(
            f"{found!r} is complex, which DeepSpeed does not train; train it under 'ddp' or 'fsdp', or "
            "keep two real parameters and view them as complex ones in the forward."
        )


def _norm(strategy: weakref.ref[DeepSpeedStrategy], module: weakref.ref[torch.nn.Module], *args: Any) -> torch.Tensor:
    """Compute a norm; who keeps a gradient keeps neither of the two."""
    owner, named = strategy(), module()
    if owner is None or named is None or named not in owner._zero:
        raise SetupError("the norm of a gradient was asked for after teardown; ask for it before.")
    return owner._norm(named, *args)
