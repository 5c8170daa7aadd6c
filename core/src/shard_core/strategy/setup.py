"""Setup: from a module as the user wrote it to one on its devices and shards, with its optimizers and its data."""

from __future__ import annotations

import abc
import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from shard_core._versions import is_compiled
from shard_core.capability import Capability
from shard_core.data import ShardedLoader, move
from shard_core.errors import InvalidOption, MissingCapability, SetupError
from shard_core.forward_calls import without_inference_mode
from shard_core.gradients import is_differentiable, on_gradient
from shard_core.initialization.synchronized_init import SynchronizedInit
from shard_core.optim.classification import why_not_elementwise
from shard_core.optim.rank_state import keep_on_rank
from shard_core.optim.routed_step import RoutedStep
from shard_core.parameters import ParameterNames, check_hooks_kept, check_no_gradients, make_strides_usual, plain_name
from shard_core.preparation.layers import LayerCalls
from shard_core.preparation.rescaled_embeddings import RescaledEmbeddings
from shard_core.preparation.sparse_gradients import DenseEmbeddingGradients
from shard_core.randomness import seed_data_rank, shared_generator
from shard_core.replicas import check_whole
from shard_core.strategy.accumulation import Accumulation, NotedZeroGrad
from shard_core.strategy.forward import ForwardOnly, ForwardPrecision
from shard_core.strategy.lifecycle import StrategyLifecycle
from shard_core.strategy.module_saves import PartialStateDict, PretrainedSaves
from shard_core.strategy.quantization import refuse_quantized
from shard_core.strategy.registry import SetUpModule

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

T = TypeVar("T")


class StrategySetup(StrategyLifecycle):
    """Sets up modules, optimizers and data loaders."""

    _in_backward = False

    @contextlib.contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Build modules inside: cheaply where the engine shards, and with the values of a plain build; all ranks enter.

        Args:
            empty_init: True promises that a checkpoint will fill every value, so none need be computed.

        Raises:
            MissingCapability: If values shall be left out and the strategy computes them all the same.
        """
        if empty_init:
            self._require(Capability.META_INIT, "leave empty_init out, every value is computed then")
        self.setup_environment()
        self.collectives.barrier("module_init_context")
        with shared_generator(self.collectives), self.engine_init_context(bool(empty_init)):
            yield

    def module_sharded_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which users wrap submodules by hand; setup wraps what they leave.

        Where the engine wraps nothing, what is wrapped inside stays as it is.
        """
        self.setup_environment()
        return self.engine_sharded_context()

    def setup_module_and_optimizers(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[torch.nn.Module, list[torch.optim.Optimizer]]:
        """Move a module and its optimizers to this strategy's devices, shards and dtypes; every rank calls this.

        Args:
            module: Not yet set up.
            optimizers: Made over its parameters; they are changed in place and stay the same objects.

        Returns:
            The module to call, and the optimizers.

        Raises:
            SetupError: If the module was set up before or has quantised weights, or an optimizer holds parameters of
                another module.
            MissingCapability: If the strategy does not promise to take what it was given.
            PrecisionMismatch: If a tensor has another dtype afterwards than the precision asks for.
        """
        if isinstance(optimizers, torch.optim.Optimizer):
            raise InvalidOption(
                "optimizers is one optimizer; give a list: setup_module_and_optimizers(module, [optimizer])."
            )
        for place, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise InvalidOption(
                    f"optimizers[{place}] is a {type(optimizer).__name__}; give torch optimizers alone, schedulers of "
                    "learning rates need no setup."
                )
        if len(optimizers) > 1:
            self._require(Capability.MULTIPLE_OPTIMIZERS)
        if not optimizers:
            self._require(Capability.INFERENCE)
        with without_inference_mode():  # what it makes is to train
            return self._set_up(module, list(optimizers)), list(optimizers)

    def setup_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Set up a module alone, for inference or for an optimizer that comes later; every rank calls this.

        Args:
            module: Not yet set up.

        Returns:
            The module to call.
        """
        self._require(Capability.INFERENCE)
        with without_inference_mode():
            return self._set_up(module, [])

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Set up an optimizer whose module was set up before; every rank calls this.

        Args:
            optimizer: Over the module's parameters as they were before or as they are now.

        Returns:
            The same optimizer.

        Raises:
            SetupError: If no module with its parameters was set up, or it has several groups of parameters whose
                numbers of dims are not the user's just now.
        """
        self._registry.check_new(optimizer)
        known = self._registry.holder(optimizer)
        if known.optimizers:
            self._require(Capability.MULTIPLE_OPTIMIZERS)
        self.collectives.barrier("setup_optimizer")
        self._check_steps_dense(known, optimizer)
        known.rescaled.check_frozen()
        self._require_elementwise([optimizer])
        known.check_groups(optimizer)
        if known.optimizers and known.waits:
            raise SetupError(
                "an optimizer was set up while gradients wait to be divided by denominators, or unscaled, as its own "
                "would never be; call setup_optimizer() before the first backward of a step."
            )
        with without_inference_mode():
            if known.sparse_embeddings is not None:
                known.sparse_embeddings.make_state_dense(optimizer)
            self.engine_add_optimizer(known.module, optimizer, known.names)
        later = Accumulation()
        later.by_backward = any(each.by_backward for each in known.optimizers.values())
        known.optimizers[optimizer] = later if known.optimizers else known.unstepped
        known.check_known(optimizer)
        known.hooks.append(optimizer.register_load_state_dict_post_hook(self._lay_out_state))
        known.hooks += keep_on_rank(optimizer, known.module, self.collectives)
        known.hooks.append(self._noted_zero_grad(optimizer, known.optimizers[optimizer], weakref.ref(known.module)))
        known.routed[optimizer] = RoutedStep(optimizer, self._step_by_hand)
        return optimizer

    def process_dataloader(
        self,
        loader: torch.utils.data.DataLoader[Any],
        *,
        split_batches: bool = False,
        shard_stream: bool | None = None,
    ) -> ShardedLoader:
        """Return a loader of this data-parallel rank's share of the data, on its device; every rank calls this.

        Args:
            loader: A loader over all data; its batch size is that of one rank.
            split_batches: Read the loader's batch size as the global one, of all ranks.
            shard_stream: For an ``IterableDataset``: True shares its batches among ranks, False passes each rank's
                own share through, None finds out with the first batch.

        Returns:
            An iterable of this rank's batches whose position can be saved and restored.

        Raises:
            InvalidOption: If batches are to be split and do not divide, or ``shard_stream`` is given for a dataset
                with indices.
        """
        self.setup_environment()
        self.collectives.barrier("process_dataloader")
        return ShardedLoader(
            loader,
            rank=self.distributed_sampler_kwargs["rank"],
            world_size=self.distributed_sampler_kwargs["num_replicas"],
            coordinator=self.collectives,
            transfer=self.batch_to_device,
            split_batches=split_batches,
            shard_stream=shard_stream,
            rounds=self._rounds,
        )

    def batch_to_device(self, batch: T) -> T:
        """Move the tensors in a batch to this rank's device.

        Args:
            batch: Any nested structure.

        Returns:
            The same structure.
        """
        return move(batch, self.root_device)

    def unwrap(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the user's own module inside what setup returned.

        Args:
            module: What setup returned, or was given.
        """
        self._registry.leave_abandoned()
        return self._registry.of(module).module

    def _set_up(self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> torch.nn.Module:
        if not isinstance(module, torch.nn.Module):
            raise InvalidOption(f"module is {module!r:.60}; give a torch.nn.Module.")
        if len(self._registry):
            self._require(Capability.SEVERAL_MODULES)
        if self._registry.find(module) is not None:
            raise SetupError(f"this {type(module).__name__} was set up already; use what setup returned.")
        if is_compiled(module):
            self._require(Capability.COMPILE, "pass the module as it was before torch.compile")
        self.setup_environment()
        check_whole(module)
        kind, names = type(module).__name__, ParameterNames(module)  # engines may exchange the class
        self.collectives.barrier(f"setup of {kind}")
        sparse = self._find_sparse(module, optimizers, names)
        self._require_elementwise(optimizers)
        refuse_quantized(module)
        rescaled = RescaledEmbeddings(module, self._data.size)
        if optimizers:
            rescaled.check_frozen()
        check_no_gradients(names)
        self.precision.convert_module(module)
        make_strides_usual(module)
        shapes, pretrained, partial = _shapes(module), PretrainedSaves(module), PartialStateDict(module)
        parameters = module.named_parameters(remove_duplicate=False)
        untrained = frozenset(plain_name(name) for name, each in parameters if not each.requires_grad)
        calls = LayerCalls(module)
        with calls.exchanged(), sparse.made_dense() if sparse else contextlib.nullcontext():
            called = self.engine_setup(module, optimizers, names)
            check_hooks_kept(names, module)
            sharded = _shapes(module) != shapes or any(isinstance(each, DTensor) for each in module.parameters())
            rescaled.check_whole(sharded=sharded)
            self.precision.check_module(module)
        if len(self._registry) == 0:
            seed_data_rank(self.distributed_sampler_kwargs["rank"])
            self.engine_seed(torch.initial_seed())
        # One process may still hold them in a form, or on a device, that nobody but the engine reads.
        spread = sharded or (self.world_size == 1 and not type(self).engine_keeps_torch_tensors)
        pretrained.install(
            self.info.name, lambda: self.engine_state({"model": module}, {}), self.collectives, spread=spread
        )
        partial.install(self.info.name, called, sharded=sharded)
        frozen = {plain_name(name): each for name, each in module.named_parameters() if not each.requires_grad}
        known = SetUpModule(
            module=module,
            callable=called,
            names=names,
            dims=sorted(map(len, shapes)),
            forward=ForwardPrecision(module, self.precision, self.root_device.type),
            pretrained=pretrained,
            partial_state=partial,
            layer_calls=calls,
            forward_only=None
            if Capability.ENTRY_METHODS in self.info.capabilities
            else ForwardOnly(self.info.name, kind, module, called, sharded=sharded),
            optimizers={optimizer: Accumulation() for optimizer in optimizers},
            hooks=[
                *(each.register_load_state_dict_post_hook(self._lay_out_state) for each in optimizers),
                *(hook for each in optimizers for hook in keep_on_rank(each, module, self.collectives)),
                *self._guard_backwards(module),
            ],
            untrained=untrained,
            frozen={} if Capability.UNFREEZE in self.info.capabilities else frozen,
            sparse_embeddings=sparse,
            rescaled=rescaled,
        )
        for owner in dict.fromkeys((module, called)):
            known.hooks.append(NotedZeroGrad(owner, known.note_zeroed, known.check_zeroes_all))
        weakly = weakref.ref(module)  # an optimizer may outlive it
        for optimizer, accumulation in known.optimizers.items():
            known.hooks.append(self._noted_zero_grad(optimizer, accumulation, weakly))
            known.routed[optimizer] = RoutedStep(optimizer, self._step_by_hand)
        parts = self.engine_flat_parts(module) or {}
        away = {each for each, part in parts.items() if 0 not in part.shape}
        if self.root_device.type in ("cpu", "cuda") and SynchronizedInit.is_needed(module, self.world_size, away):
            known.hooks.append(SynchronizedInit(module, away))
        names.let_go()
        self._registry.add(known)
        known.note_parameters(part.values for part in parts.values())
        return called

    @abc.abstractmethod
    def _step_by_hand(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """Step an optimizer whose user has called its ``step``."""

    def _noted_zero_grad(
        self, optimizer: torch.optim.Optimizer, accumulation: Accumulation, module: weakref.ref[torch.nn.Module]
    ) -> NotedZeroGrad:
        def note() -> None:
            accumulation.reset()
            self._follow(module)  # what it shows of them goes, too

        # Gradients that users have put in the place of others are zeroed, too.
        return NotedZeroGrad(optimizer, note, lambda: self._follow(module))

    def _follow(self, module: weakref.ref[torch.nn.Module]) -> None:
        known = module()
        if known is not None:
            self.engine_follow_gradients(known)

    def _guard_backwards(self, module: torch.nn.Module) -> list[RemovableHandle]:
        if type(self).engine_minds_plain_backward:
            return []
        return [on_gradient(each, self._check_backward) for each in module.parameters() if is_differentiable(each)]

    def _check_backward(self, parameter: torch.Tensor) -> None:
        del parameter
        if not self._in_backward:
            raise SetupError(
                "loss.backward() would leave gradients on their rank, and replicas would drift apart; call "
                "strategy.backward(loss, model), which averages them."
            )

    def _lay_out_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Cut whole tensors that ``optimizer.load_state_dict`` was given, as setup does with what is there already."""
        sparse = self._registry.owner(optimizer).sparse_embeddings
        if sparse is not None:
            sparse.make_state_dense(optimizer)
        for parameter in [parameter for group in optimizer.param_groups for parameter in group["params"]]:
            for slot, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    optimizer.state[parameter][slot] = self.engine_lay_out_state(parameter, slot, value)

    def _find_sparse(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> DenseEmbeddingGradients | None:
        """Find what has sparse gradients that the engine does not take, and refuse optimizers that need them so."""
        if type(self).engine_takes_sparse_gradients:
            return None
        sparse = DenseEmbeddingGradients(module, names)
        for optimizer in optimizers:
            sparse.check(optimizer, names.find, self.info.name)
            sparse.make_state_dense(optimizer)
        return sparse

    def _check_steps_dense(self, known: SetUpModule, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer steps gradients as sparse ones that the engine has as dense ones."""
        if known.sparse_embeddings is None or not known.sparse_embeddings.found:
            return
        parts = self.engine_flat_parts(known.module) or {}
        names = {
            parts[each].values if each in parts else each: plain_name(name)
            for name, each in known.module.named_parameters()
        }
        known.sparse_embeddings.check(optimizer, lambda each: names.get(each, known.names.find(each)), self.info.name)

    def _require_elementwise(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Refuse on all ranks what rank 0 refuses; were each to judge for itself, some might go on alone."""
        if Capability.ANY_OPTIMIZER in self.info.capabilities:
            return
        mine = self._why_refused(optimizers) if self.is_global_zero else None
        refused = self.collectives.broadcast_object(mine)
        if refused is not None:
            raise MissingCapability(refused)

    def _why_refused(self, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
        for optimizer in optimizers:
            reason = why_not_elementwise(optimizer, _compared_on(self.root_device))
            if reason is not None:
                return (
                    f"strategy {self.info.name!r} does not promise ANY_OPTIMIZER: it steps only optimizers that work "
                    f"element by element, such as AdamW, and {type(optimizer).__name__} is not known to, because "
                    f"{reason}; take another optimizer, or a strategy that promises it."
                )
        return None


def _compared_on(device: torch.device) -> torch.device:
    """Choose where results can be compared bit for bit: compilers of whole graphs fuse operations."""
    return device if device.type == "cuda" else torch.device("cpu")


def _shapes(module: torch.nn.Module) -> list[tuple[int, ...]]:
    """List the shapes of a module's parameters, in an order that does not depend on its wrappers."""
    return sorted(tuple(parameter.shape) for parameter in module.parameters())
