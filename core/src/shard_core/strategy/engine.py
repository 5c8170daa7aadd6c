"""What a backend implements: the few things in which engines really differ."""

from __future__ import annotations

import abc
import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from shard_core.capability import Capability
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.gradients import on_gradient
from shard_core.parameters import laid_out_like

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from shard_core.checkpoint.state.shard import FlatPart
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.collectives.interface import Collectives
    from shard_core.gradients import LocalGradient
    from shard_core.parameters import ParameterNames
    from shard_core.plugins.info import StrategyInfo
    from shard_core.precision.interface import Precision
    from shard_core.run_options import RunOptions


class Engine(abc.ABC):
    """The members a strategy's author writes; users call those of ``Strategy``, which call these.

    Order of calls: ``engine_precision``, ``engine_check_options``, ``engine_collectives``, ``engine_mesh``,
    ``engine_seed``; then per module ``engine_init_context`` and ``engine_setup``, ``engine_add_optimizer`` for an
    optimizer that comes later, ``engine_lay_out_state`` when users load the state of one; per step
    ``engine_defers_sync``, ``engine_no_sync``, ``engine_follow_gradients``, ``engine_backward``,
    ``engine_on_gradient``, ``engine_check_averaged``, ``engine_gradients``, ``engine_look`` and ``engine_step``, or
    ``engine_skip_step``; ``engine_state`` to save and load; ``engine_flat_parts``, ``engine_copy`` and
    ``engine_publish_parts`` to keep averages of weights; ``engine_teardown`` at the end. Arguments were checked before.
    ``engine_worth_trying`` stands apart: nothing has been started then.

    Nine members may exchange messages between ranks, because core calls them on every rank in the same order, or on
    none: ``engine_mesh``, ``engine_setup``, ``engine_add_optimizer``, ``engine_backward``, ``engine_check_averaged``,
    ``engine_gradients``, ``engine_step``, ``engine_skip_step`` and ``engine_publish_parts``. All others serve their
    rank alone. A member that refuses raises before its first message, and on every rank.
    """

    #: What is known of the strategy under the name it was asked for.
    info: StrategyInfo

    #: The arguments every strategy takes.
    options: RunOptions

    #: The backend's own options, of type ``config_type``.
    config: Any

    #: The precision: which dtype where.
    precision: Precision

    #: The collectives of all ranks.
    collectives: Collectives

    #: What ``shard_strategy`` returns for the strategy when its class is built without a name.
    default_info: ClassVar[StrategyInfo]

    #: The frozen dataclass of the backend's own options.
    config_type: ClassVar[type]

    #: Whether parameters are torch's tensors or DTensors under the user's names, so that copies of them are kept
    #: and saved as they are.
    engine_keeps_torch_tensors: ClassVar[bool] = False

    #: What users may name as ``collectives``, and the class of each; the first is the default.
    engine_collectives_types: ClassVar[Mapping[str, type[Collectives]]] = {"process_group": ProcessGroupCollectives}

    #: Whether ``loss.backward()``, past the strategy, is right or refused by what the engine does itself. Elsewhere
    #: core refuses it: gradients that ``engine_backward`` alone averages would stay on their rank.
    engine_minds_plain_backward: ClassVar[bool] = False

    #: Whether the engine averages sparse gradients. Elsewhere embeddings that were made with ``sparse=True`` compute
    #: dense ones while they are set up, and core refuses optimizers that step these otherwise.
    engine_takes_sparse_gradients: ClassVar[bool] = False

    #: Keywords of ``Tensor.backward`` that ``engine_backward`` honours; others are refused by name.
    engine_backward_keywords: ClassVar[Sequence[str]] = ("gradient", "retain_graph")

    def engine_precision(self, precision: Precision) -> Precision:
        """Choose the precision; by default the one made from the argument ``precision``.

        Args:
            precision: That one.

        Raises:
            InvalidOption: If an option of the engine contradicts it.
        """
        return precision

    def engine_check_options(self) -> None:  # noqa: B027 - most options are checked one by one
        """Check what takes several options, the arguments every strategy takes or the precision; by default nothing.

        Called when the strategy is built, in whichever process that is: nothing has been started.

        Raises:
            InvalidOption: If they contradict one another.
            UnsupportedPrecision: If the options leave the engine unable to honour the precision.
        """

    def engine_collectives(self, name: str) -> Collectives:
        """Create the collectives of this engine, unconnected; by default those of ``engine_collectives_types``.

        Args:
            name: One of the names there: what the user chose, or the default.
        """
        options, made_by = self.options, type(self).engine_collectives_types[name]
        return made_by.for_run(
            backend=options.process_group_backend, timeout=options.timeout, guard_timeout=options.guard_timeout
        )

    def engine_mesh(self) -> DeviceMesh | None:
        """Build the mesh of devices; None, the default, if the engine has none: then every rank sees its own data.

        Called on every rank, now that ranks are connected; may communicate. What an engine holds for its rank and
        cannot travel there with the strategy, such as weak references, is made here.
        """
        return None

    def engine_seed(self, seed: int) -> None:  # noqa: B027 - most engines have nothing to add
        """Seed the generators that ``torch.manual_seed`` does not reach; by default there are none.

        Called when the engine has started, when the user seeds, and when each data rank gets a seed of its own; a user
        may seed on one rank alone.

        Args:
            seed: Torch's own, now.
        """

    def engine_random_state(self) -> torch.Tensor | None:
        """Return the state of the generator that ``engine_seed`` seeds; None if there is none to go on from.

        Returns:
            A tensor in host memory, of the same shape and dtype on every rank.
        """
        return None

    def engine_set_random_state(self, state: torch.Tensor) -> None:  # noqa: B027 - most engines have none
        """Set the generator to a state that ``engine_random_state`` returned, in this run or an earlier one.

        Args:
            state: What ``engine_random_state`` returned.
        """

    def engine_init_context(self, empty_init: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context in which users build modules; by default every rank builds as plain PyTorch does.

        Args:
            empty_init: Whether values may be left unset because a checkpoint will fill them.
        """
        del empty_init
        return contextlib.nullcontext()

    def engine_sharded_context(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which users wrap submodules by hand; an engine that wraps none leaves this out."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def engine_setup(
        self, module: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], names: ParameterNames
    ) -> torch.nn.Module:
        """Move a module to its devices and shards, and point optimizers at what became of its parameters.

        Every rank has built the module, with values that may differ: all must train rank 0's. May communicate.

        Args:
            module: The user's module, its dtypes those of the precision.
            optimizers: Optimizers over its parameters; may be empty.
            names: The names its parameters have now.

        Returns:
            What the user calls from here on: the module itself, or a wrapper around it.
        """

    @abc.abstractmethod
    def engine_add_optimizer(
        self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, names: ParameterNames
    ) -> None:
        """Point an optimizer that came after setup at a module's parameters; may communicate.

        Args:
            module: The user's module, set up.
            optimizer: An optimizer over its parameters, as they were before setup or as they are.
            names: The names its parameters had before setup.
        """

    def engine_lay_out_state(self, parameter: torch.Tensor, slot: str, value: torch.Tensor) -> torch.Tensor:
        """Return a value of optimizer state laid out like the parameter it belongs to; must not communicate.

        For ``optimizer.load_state_dict`` of what plain PyTorch has saved, which gives every rank whole tensors.

        Args:
            parameter: One in the groups of an optimizer that was set up.
            slot: What the optimizer calls the value, such as ``exp_avg``.
            value: The same on every rank. One that has not the whole parameter's shape is returned as it is.
        """
        del slot
        laid_out: torch.Tensor = laid_out_like(parameter, value)
        return laid_out

    @property
    def engine_defers_sync(self) -> bool:
        """Whether the engine, as it is configured, can leave averaging to a later backward.

        By default what the strategy promises by its name; an engine whose options decide overrides it.
        """
        return Capability.DEFER_SYNC in self.info.capabilities

    def engine_no_sync(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backwards keep gradients on this rank; the next one outside averages their sum.

        A loss may come through several modules, and that next one through others: gradients that wait in this module
        are averaged all the same, or ``engine_step`` refuses an optimizer over them as long as they wait.

        Called only where ``engine_defers_sync``, and not again inside; entering and leaving send nothing. An engine
        that has nothing to send leaves this out. One whose deferred gradients stand elsewhere than in ``.grad`` shows
        zeros there, and throws them away in the next backward or step where users have thrown these away. That these
        were changed, which would not reach them, it refuses by name; they are thrown away then, too.

        Args:
            module: What ``engine_setup`` returned.
        """
        del module
        return contextlib.nullcontext()

    @abc.abstractmethod
    def engine_backward(self, loss: torch.Tensor, module: torch.nn.Module, **kwargs: Any) -> None:
        """Run one backward; gradients add up, averaged over data-parallel ranks. May communicate.

        Args:
            loss: A scalar, or another tensor with its ``gradient`` among ``kwargs``.
            module: What ``engine_setup`` returned.
            kwargs: What the user passed through, for ``Tensor.backward``.
        """

    def engine_drop_unfinished(self) -> None:  # noqa: B027 - for engines that keep gradients elsewhere than in .grad
        """Throw away all gradients, and what a backward that an exception has ended was about to send.

        Called where ``engine_backward`` has raised, so that the run can go on with a new step, as after a lack of
        memory. Must not communicate; core sets ``.grad`` of all parameters to None.
        """

    @abc.abstractmethod
    def engine_gradients(self, optimizer: torch.optim.Optimizer) -> list[LocalGradient]:
        """Return this rank's parts of the gradients an optimizer will step with, sharing their memory.

        Asked after ``engine_check_averaged``, several times in a step, by clipping and by what makes gradients final;
        may communicate. Afterwards ``.grad`` of what its groups hold is what it would step with, laid out as its state.

        Args:
            optimizer: One that was set up, or a stand-in over a module's parameters as they are.
        """

    def engine_check_averaged(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - for engines that defer
        """Check that no gradient of an optimizer waits to be averaged over ranks, or is one rank's alone just now.

        Called before gradients are made final, by clipping, a step or the end of a closure, and before they are shown;
        may communicate.

        Args:
            optimizer: One that was set up, or a stand-in over a module's parameters as they are.

        Raises:
            SetupError: If one does, on every rank.
        """

    def engine_look(self, value: torch.Tensor) -> bool:
        """Return whether a number is true, in the middle of a step; it is the same on every rank.

        An engine that computes lazily first runs what is pending, or it would run once for the answer and once more
        for the step.

        Args:
            value: A 0-d tensor made of gradients.
        """
        return bool(value)

    @abc.abstractmethod
    def engine_step(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, **kwargs: Any) -> None:
        """Step an optimizer, on every rank or on none; may communicate.

        Call ``optimizer.step`` of this very optimizer, once: only then do the user's hooks on it, those of
        ``register_step_pre_hook`` and ``register_step_post_hook``, run, and run once, and its schedulers count the
        step. An engine that steps other tensors than the groups hold, or some of them, exchanges those inside of all
        hooks, as ``local_step`` and ``owned_step`` do, so that hooks see whole groups. What users call as
        ``optimizer.step()`` comes here, too; what cannot, by the class's method, is refused.

        Args:
            optimizer: One that was set up; its gradients are final.
            closure: Evaluates the loss again, gradients final; None without one.
            kwargs: What the user passed through.
        """

    def engine_skip_step(self, optimizer: torch.optim.Optimizer) -> None:  # noqa: B027 - for engines whose steps do more
        """Do what ``engine_step`` does besides, where a gradient scaler skips it on every rank; may communicate."""

    def engine_checkpoint_form(self) -> str | None:
        """Return the form of checkpoints that an option of the engine sets, unless the user asks; None without one."""
        return None

    @abc.abstractmethod
    def engine_state(
        self, modules: Mapping[str, torch.nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> TrainingState:
        """Describe which parts of modules and optimizers live on this rank.

        May not communicate: while this rank is here, another may have refused what its user gave it. What ranks must
        know of one another is exchanged by ``TrainingState.exchange``.

        Args:
            modules: The user's modules by the user's keys.
            optimizers: Optimizers over them by the user's keys.
        """

    def engine_follow_gradients(self, module: torch.nn.Module) -> None:  # noqa: B027 - for engines that show copies
        """Drop what optimizers step for gradients that users have set to None in the module.

        Called before a backward is counted: denominators of what was thrown away go with it; and before an optimizer
        zeroes them. Must not communicate.

        Args:
            module: What ``engine_setup`` was given.
        """

    def engine_on_gradient(
        self, parameter: torch.Tensor, called: Callable[[torch.Tensor], object]
    ) -> RemovableHandle | None:
        """Have a function called with a parameter after each backward that has reached it; must not communicate.

        Args:
            parameter: One that an optimizer steps, or of a module that no optimizer was set up with.
            called: Learns of backwards that come past the strategy's own.

        Returns:
            What ends that; None where the engine refuses such backwards by itself.
        """
        return on_gradient(parameter, called)

    def engine_copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy what this rank holds of a tensor, placed and laid out alike; must not communicate.

        Args:
            tensor: Of a module that was set up, or of an average of its weights.
            dtype: The copy's.
        """
        return tensor.detach().to(dtype, copy=True)

    def engine_flat_parts(self, module: torch.nn.Module) -> Mapping[torch.Tensor, FlatPart] | None:
        """Return what this rank holds of parameters that the engine keeps flat; None, the default, if it keeps none.

        For averages of weights, which are taken of the values; they are written into them to be evaluated, and then
        ``engine_publish_parts`` is called. What users have written into the module is in the values. A parameter that
        is left out is a tensor of torch's, the same on every rank, and left out on every rank. Must not communicate.

        Args:
            module: What ``engine_setup`` was given.
        """
        del module
        return None

    def engine_publish_parts(self, module: torch.nn.Module) -> None:  # noqa: B027 - for engines that have such parts
        """Copy values that were written into a module's flat parts to where forwards read them; may communicate.

        Args:
            module: What ``engine_setup`` was given.
        """

    def engine_worth_trying(
        self, module: torch.nn.Module, world_size: int
    ) -> Generator[Sequence[Mapping[str, Any]], Mapping[str, Any], None]:
        """Yield settings that may train a module faster than those the user has, for ``shard tune`` to measure.

        Called on a strategy that was not started. Settings change what a step costs and nothing of what it computes;
        what only the user can promise, or what holds for certain hardware, is not among them. A strategy with nothing
        to tune leaves this out.

        Args:
            module: The user's, in host memory, not set up.
            world_size: On how many ranks it will be trained.

        Yields:
            Settings to measure next, each some of the strategy's options by name, in addition to what the user has
            chosen; sends back the best of all so far, empty if none is better than what the user has.
        """
        del module, world_size
        yield from ()

    def engine_teardown(self) -> None:  # noqa: B027 - most engines hold nothing
        """Release what was set up for the modules; ranks are still connected, and perhaps out of step.

        Nothing in here waits for another rank: some may be gone. An engine that holds nothing leaves this out.
        """
