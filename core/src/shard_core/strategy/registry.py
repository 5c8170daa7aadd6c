"""The modules and optimizers that were set up, by identity."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shard_core.checkpoint.state.training_state import KeySpace
from shard_core.errors import InvalidOption, SetupError
from shard_core.gradients import is_differentiable
from shard_core.parameters import plain_name
from shard_core.strategy.accumulation import Accumulation, NotedZeroGrad, check_strange, has_gradients, stepped_by

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from shard_core.initialization.synchronized_init import SynchronizedInit
    from shard_core.optim.routed_step import RoutedStep
    from shard_core.parameters import ParameterNames
    from shard_core.preparation.layers import LayerCalls
    from shard_core.preparation.rescaled_embeddings import RescaledEmbeddings
    from shard_core.preparation.sparse_gradients import DenseEmbeddingGradients
    from shard_core.strategy.forward import ForwardOnly, ForwardPrecision
    from shard_core.strategy.module_saves import PartialStateDict, PretrainedSaves


@dataclasses.dataclass(kw_only=True, eq=False)
class SetUpModule:
    """A module that was set up.

    Attributes:
        module: The user's own.
        callable: What the user calls: the same, or the engine's wrapper.
        names: The names its parameters had before setup.
        dims: Their numbers of dims then, sorted.
        forward: Its forward's precision.
        pretrained: What replaces its ``save_pretrained``.
        partial_state: What refuses its ``state_dict`` where that would hold parts, and copies of it.
        layer_calls: How its parts ran before setup.
        forward_only: What refuses calls past its forward; None if its other methods may be called.
        optimizers: The optimizers over its parameters, with what their gradients still need.
        guests: Those of other modules that were given groups of its parameters.
        hooks: Those on its parameters and the optimizers, and on what draws values anew.
        routed: What brings each optimizer's ``step`` to the strategy.
        rescaled: Its embeddings with ``max_norm``.
        unstepped: What gradients still need while there is no optimizer.
        untrained: The names, those of ties included, of parameters that were frozen at setup, and in every backward
            and step since.
        frozen: Those of them that must stay so, by name.
        sparse_embeddings: Its embeddings made with ``sparse=True``, where the engine has dense gradients alone.
        known: The parameters that setup has left in it, and those of its optimizers; held, for what is freed leaves
            its identity to what comes after.
        accepted: Those of other modules that its optimizers step.
        inside_no_sync: Whether ``no_backward_sync`` is entered just now.
        last_inside: Whether the last backward, of whichever module, stood inside, so that no step may follow, whatever
            the engine deferred.
    """

    module: nn.Module
    callable: nn.Module
    names: ParameterNames
    dims: Sequence[int]
    forward: ForwardPrecision
    pretrained: PretrainedSaves
    partial_state: PartialStateDict
    layer_calls: LayerCalls
    forward_only: ForwardOnly | None
    optimizers: dict[torch.optim.Optimizer, Accumulation]
    hooks: list[RemovableHandle | NotedZeroGrad | SynchronizedInit]
    rescaled: RescaledEmbeddings
    routed: dict[torch.optim.Optimizer, RoutedStep] = dataclasses.field(default_factory=dict)
    unstepped: Accumulation = dataclasses.field(default_factory=Accumulation)
    untrained: frozenset[str] = frozenset()
    frozen: dict[str, nn.Parameter] = dataclasses.field(default_factory=dict)
    sparse_embeddings: DenseEmbeddingGradients | None = None
    known: set[torch.Tensor] = dataclasses.field(default_factory=set)
    accepted: set[torch.Tensor] = dataclasses.field(default_factory=set)
    guests: dict[torch.optim.Optimizer, Accumulation] = dataclasses.field(default_factory=dict)
    inside_no_sync: bool = False
    last_inside: bool = False

    def accumulations(self) -> Iterator[tuple[list[torch.Tensor], Accumulation]]:
        """Yield parameters and what their gradients still need: each optimizer's, or else the module's."""
        for optimizer, accumulation in (*self.optimizers.items(), *self.guests.items()):
            yield stepped_by(optimizer), accumulation
        if not self.optimizers and not self.guests:
            yield list(self.module.parameters()), self.unstepped

    @property
    def waits(self) -> bool:
        """Whether gradients of the module are yet to be divided by denominators, or unscaled."""
        return any(accumulation.waits for _, accumulation in self.accumulations())

    def note_zeroed(self) -> None:
        """Forget what the module's gradients still needed: they begin anew, unless others are there beside them."""
        for parameters, accumulation in self.accumulations():
            if not accumulation.shared or not has_gradients(parameters):
                accumulation.reset()

    def check_zeroes_all(self) -> None:
        """Check that gradients of other modules do not wait together with the module's, which are about to be zeroed.

        Raises:
            SetupError: If some do: all are divided by the same denominators, which would go.
        """
        if any(accumulation.shared and accumulation.waits for _, accumulation in self.accumulations()):
            raise SetupError(
                "zero_grad() of one module while gradients of another, which the same optimizer steps, are yet to be "
                "divided by denominators or unscaled; call optimizer.zero_grad(), which zeroes both."
            )

    def note_gradients(
        self, on_plain_gradient: Callable[[torch.Tensor, Callable[[], None]], RemovableHandle | None]
    ) -> None:
        """Record, after a backward of the strategy, what gradients there are, and watch for others that come past it.

        Those would be divided by denominators, too.

        Args:
            on_plain_gradient: Has a function called whenever a parameter gets such a gradient.
        """
        for parameters, accumulation in self.accumulations():
            accumulation.note_gradients(parameters)
            if accumulation.waits and not accumulation.followed:
                accumulation.followed = True
                able = filter(is_differentiable, parameters)
                hooks = (on_plain_gradient(each, accumulation.note_plain) for each in able)
                self.hooks.extend(hook for hook in hooks if hook)

    def drop_gradients(self) -> None:
        """Throw away the module's gradients, those that its optimizers hold elsewhere too."""
        held = itertools.chain.from_iterable(parameters for parameters, _ in self.accumulations())
        for parameter in itertools.chain(self.module.parameters(), held):
            parameter.grad = None
        self.note_zeroed()
        self.last_inside = False

    def check_averaged(self) -> None:
        """Check that gradients have been averaged over ranks, alike whether the engine has deferred that or not.

        Raises:
            SetupError: If the last backward stood inside ``no_backward_sync``.
        """
        if self.last_inside:
            raise SetupError(
                "the last backward was inside no_backward_sync, which leaves averaging gradients over ranks to a later "
                "one; run the last one before a step outside: no_backward_sync(model, enabled=not last)."
            )

    def note_parameters(self, parts: Iterable[torch.Tensor]) -> None:
        """Record the parameters that module and optimizers have now.

        Args:
            parts: What optimizers may be given in their stead.
        """
        self.known.update(self.module.parameters(), parts)
        for parameters, _ in self.accumulations():
            self.known.update(parameters)

    def check_known(self, optimizer: torch.optim.Optimizer, others: Iterable[SetUpModule] = (), ranks: int = 1) -> None:
        """Check that an optimizer steps nothing that was put into the module after setup, or that no module holds.

        Args:
            optimizer: One of the module's.
            others: Further modules whose parameters it may step.
            ranks: How many there are: on one, a parameter that no module holds is trained as in plain PyTorch.

        Raises:
            SetupError: If it does: the gradient of such a parameter is that of one rank.
        """
        stepped = [each for each in stepped_by(optimizer) if each not in self.known and each not in self.accepted]
        if not stepped:
            return
        ours: dict[torch.Tensor, str] = {each: name for name, each in self.module.named_parameters()}
        new = [ours[each] for each in stepped if each in ours]
        if new:
            raise SetupError(
                f"an optimizer steps {new[0]!r}, which was put into the module after setup: its gradient would be that "
                "of each rank alone, and ranks would drift apart; change modules and add adapters before setup."
            )
        stray = [each for each in stepped if ranks > 1 and not any(each in other.known for other in others)]
        if stray:
            raise SetupError(
                f"an optimizer steps a parameter of shape {tuple(stray[0].shape)} of no module that was set up: its "
                "gradient would be that of each rank alone, and ranks would drift apart; register it in the module "
                "before setup, as an attribute or in an nn.ParameterList, not in a plain list."
            )
        self.accepted.update(stepped)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that one of the module's optimizers steps, and what that trains.

        Args:
            optimizer: Which.
        """
        self.optimizers[optimizer].note_step()
        self.note_trained()

    def note_trained(self) -> None:
        """Record which parameters a backward or a step trains that were frozen at setup."""
        if self.untrained:
            self.untrained = frozenset(self.never_trained())

    def never_trained(self) -> list[str]:
        """List the names of parameters that were frozen at setup, in every backward and step since, and still are."""
        now = self.module.named_parameters(remove_duplicate=False)
        return sorted(self.untrained - {plain_name(name) for name, each in now if each.requires_grad})

    def check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse groups that may have been formed by dims that setup has changed.

        Engines may leave their tensors in the user's own parameters; whether an optimizer over those was made
        before setup or after cannot be seen.

        Args:
            optimizer: Over the module's parameters as they were, or as they are.

        Raises:
            SetupError: If it has several groups of parameters as they are, and their dims are not the user's.
        """
        now = {id(parameter) for parameter in self.module.parameters()}
        held = any(id(parameter) in now for group in optimizer.param_groups for parameter in group["params"])
        changed = sorted(parameter.dim() for parameter in self.module.parameters()) != self.dims
        if changed and len(optimizer.param_groups) > 1 and held:
            raise SetupError(
                f"this {type(optimizer).__name__} has several groups of parameters that setup has flattened: whether "
                "one was a matrix can no longer be seen, so groups may be wrong without a word; make the optimizer "
                "before setup and give both to setup_module_and_optimizers(), or give it one group."
            )


class Registry:
    """All modules of one strategy."""

    def __init__(self) -> None:
        self._modules: list[SetUpModule] = []
        self._guard: RemovableHandle | None = None

    def __len__(self) -> int:
        """Count the modules."""
        return len(self._modules)

    def __iter__(self) -> Iterator[SetUpModule]:
        """Iterate over the modules in the order of their setup."""
        return iter(self._modules)

    def add(self, module: SetUpModule) -> None:
        """Add a module."""
        self._modules.append(module)
        if self._guard is None:
            check = weakref.WeakMethod(self._check_set_up)  # torch holds it for as long as the process lives
            self._guard = register_optimizer_step_pre_hook(
                lambda optimizer, *_: found(optimizer) if (found := check()) else None
            )

    def _check_set_up(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step of an optimizer that was never set up, where it would train wrong or nothing."""
        for known in self._modules:
            if optimizer not in (*known.optimizers, *known.guests):
                check_strange(optimizer, known)

    def find(self, module: nn.Module) -> SetUpModule | None:
        """Find a module by itself or by what the user calls."""
        return next((known for known in self._modules if module in (known.module, known.callable)), None)

    def of(self, module: nn.Module) -> SetUpModule:
        """Find a module that must have been set up.

        Raises:
            SetupError: If it was not.
        """
        known = self.find(module)
        if known is None:
            raise SetupError(
                f"this {type(module).__name__} was not set up by this strategy; pass it to "
                "setup_module_and_optimizers() first and use what that returns."
            )
        return known

    def owner(self, optimizer: torch.optim.Optimizer) -> SetUpModule:
        """Find the module an optimizer was set up with.

        Raises:
            InvalidOption: If it is no optimizer.
            SetupError: If it was set up with none.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidOption(
                f"optimizer is of type {type(optimizer).__name__}; give one torch optimizer, of the list that setup "
                "returned: model, (optimizer,) = strategy.setup_module_and_optimizers(model, [optimizer])."
            )
        for known in self._modules:
            if optimizer in known.optimizers:
                return known
        raise SetupError(
            f"this {type(optimizer).__name__} was not set up by this strategy; pass it to "
            "setup_module_and_optimizers() together with its module, or to setup_optimizer()."
        )

    def holder(self, optimizer: torch.optim.Optimizer) -> SetUpModule:
        """Find the module whose parameters an optimizer holds, as they are or as they were.

        Raises:
            SetupError: If there is none, or it holds some of several.
        """
        held = stepped_by(optimizer)
        for known in self._modules:
            now = {id(parameter) for parameter in known.module.parameters()}
            mine = sum(id(parameter) in now or parameter in known.names for parameter in held)
            if mine == len(held):
                return known
            if mine:
                raise SetupError(
                    f"this {type(optimizer).__name__} holds {mine} parameters of one module and {len(held) - mine} "
                    "others, and its state is saved under the names of one; give each module an optimizer of its own, "
                    "or set up one module that has both."
                )
        raise SetupError(
            f"this {type(optimizer).__name__} holds parameters of no module that was set up; "
            "call setup_module() for the module first."
        )

    def check_new(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer was not set up before.

        Raises:
            SetupError: If it was.
        """
        if any(optimizer in known.optimizers for known in self._modules):
            raise SetupError(f"this {type(optimizer).__name__} was set up already; go on with it as it is.")

    def leave_abandoned(self) -> None:
        """Leave the precision's context of forwards that a ``KeyboardInterrupt`` has ended."""
        for known in self._modules:
            known.forward.leave_abandoned()

    def untrained_keys(self, modules: Mapping[str, nn.Module]) -> list[str]:
        """List the keys, in a checkpoint, of the parameters of modules that nothing has trained since setup.

        Args:
            modules: By the user's keys.
        """
        keys = KeySpace(list(modules))
        found = {name: self.find(module) for name, module in modules.items()}
        return [keys.parameter(key, name) for key, known in found.items() if known for name in known.never_trained()]

    def note_filled(self, modules: Mapping[str, nn.Module], left_out: Collection[str]) -> None:
        """Record that a checkpoint has filled modules: what it has given need not be there where another is loaded.

        Args:
            modules: By the user's keys.
            left_out: The keys of the parameters that it was saved without.
        """
        keys = KeySpace(list(modules))
        for key, module in modules.items():
            known = self.find(module)
            if known is not None:
                known.untrained &= {name for name in known.untrained if keys.parameter(key, name) in left_out}

    def note_backward(self) -> None:
        """Record of every module whether a backward stands inside ``no_backward_sync`` of it, and that there was one.

        Which modules a loss came through need not be the same on every rank; which contexts are entered is.
        """
        for known in self._modules:
            known.last_inside = known.inside_no_sync
            known.note_trained()
            for accumulation in (*known.optimizers.values(), known.unstepped):
                accumulation.by_backward = True

    def clear(self) -> None:
        """Remove all modules, and all hooks from them, and let their parts run as they did."""
        for known in self._modules:
            known.forward.remove()
            known.pretrained.remove()
            known.partial_state.remove()
            known.layer_calls.restore()
            if known.sparse_embeddings is not None:
                known.sparse_embeddings.restore()
            for hook in (*known.hooks, *known.routed.values()):
                hook.remove()
            if known.forward_only is not None:
                known.forward_only.remove()
        self._modules.clear()
        if self._guard is not None:
            self._guard.remove()
            self._guard = None
