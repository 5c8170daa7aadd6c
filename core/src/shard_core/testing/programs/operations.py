"""The operations of random programs: plain data, each with what it needs to be run again anywhere."""

from __future__ import annotations

import dataclasses

from shard_core.testing.programs.file_operations import Fail, Load, LoadWeights, Save, SavePretrained, Switch

__all__ = [
    "MICRO_BATCHES", "AddGroup", "Attempt", "Backward", "ChangeLearningRate", "ClipNorm", "ClipValue", "Closure",
    "EditGradients", "EditWeights", "Evaluate", "Fail", "Forward", "Freeze", "HookGradients", "Initialize", "Load",
    "LoadStateDict", "LoadWeights", "Operation", "Reduce", "ReloadOptimizer", "Save", "SavePretrained", "Seed",
    "ShowAverage", "ShowGradients", "ShowParameters", "ShowWeights", "Step", "StepScheduler", "Switch",
    "UpdateAverage", "ZeroByHand", "ZeroGrad",
]  # fmt: skip

MICRO_BATCHES = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backward:
    """Forward and backward of one micro-batch.

    Attributes:
        module: Which module.
        key: Which batch.
        rows: The samples of each data rank.
        how: ``"plain"``; ``"retain_graph"``: two backwards through one graph; ``"two_forwards"``: of one loss;
            ``"crossed"``: two forwards, then their backwards in the other order; ``"gradient"``: of the output, bent by
            a layer without parameters that is called by itself, and its gradient; ``"method"``: through an entry
            method; ``"layers"``: through layers that are called by themselves; ``"contrastive"``: each row's output is
            told from those of all data ranks; ``"through"``: the first module's output goes on through the second,
            whichever is named; ``"frozen"``: the layer on top is frozen before the backward, and trained again after
            it; ``"eval"``: of a module in evaluation mode; ``"penalty"``: of the loss and the squares of its inputs'
            gradients; ``"slopes"``: of the squares alone of the output's gradients for the inputs, as a critic's
            penalty, which comes past what the model returns; ``"zeroed"``, ``"cleared"`` and ``"dropped"``: between the
            two, optimizers or the module zero the gradients of before, or they are set to None by hand; ``"detached"``:
            of the second module, on the first's output without gradients; ``"squares"``: then one of each trained
            parameter's squares; ``"by hand"`` and ``"slopes by hand"``: by ``loss.backward()``, which a strategy may
            refuse; ``"accumulated"``: of ``MICRO_BATCHES``, of which the last is sent.
        denominator: Whether the loss is a sum and its rows are the denominator.
        deferred: Whether it stands inside ``no_backward_sync``.
        extra: Whether the block that is not always called is; with ``alone``, on the first data rank alone.
        unused: Whether, with ``alone``, the other ranks call it too, and do not use what it returns.
    """

    module: int = 0
    key: int
    rows: tuple[int, ...]
    how: str = "plain"
    denominator: bool = False
    deferred: bool = False
    extra: bool = False
    alone: bool = False
    unused: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forward:
    """A forward without a backward: ``train``, ``eval``, ``no_grad``, ``inference``, ``unwrap`` or entry ``method``.

    ``interrupted`` has a backward, which an exception ends at the output, and all gradients are thrown away;
    ``interrupted by hand`` is ``backward()`` of the output itself, after which the program throws them away. ``failed``
    and ``failed evaluation`` are ended by an exception themselves.
    """

    module: int = 0
    key: int
    how: str = "eval"

    @property
    def stopped(self) -> bool:
        """Whether the exception that ends it is a ``KeyboardInterrupt``, which torch's hooks do not hear of."""
        return self.how.startswith("failed") and self.key % 2 == 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipNorm:
    """Clip an optimizer's gradients by their global norm; ``norm_type`` may be infinite.

    Attributes:
        optimizer: Which optimizer.
        max_norm: What their norm is afterwards at most.
        norm_type: Which norm.
        finite: Whether a norm that is no number is an error.
        fails: Whether that error is expected: gradients, if there are any, were made infinite.
    """

    optimizer: int = 0
    max_norm: float
    norm_type: float = 2.0
    finite: bool = True
    fails: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipValue:
    """Clamp an optimizer's gradients."""

    optimizer: int = 0
    value: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Step an optimizer; ``by_hand``: by its own method."""

    optimizer: int = 0
    by_hand: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Closure:
    """Step an optimizer with a closure that computes the gradients; ``by_hand``: by its own method."""

    optimizer: int = 0
    key: int
    rows: tuple[int, ...]
    by_hand: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroGrad:
    """Zero gradients, through a module or an optimizer."""

    of_module: bool = False
    which: int = 0
    set_to_none: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroByHand:
    """Zero a module's gradients by hand, parameter by parameter."""

    module: int = 0
    set_to_none: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditGradients:
    """Multiply a module's gradients by hand, also by others or by their data, make all infinite, or clip them by torch.

    Attributes:
        module: Which module.
        factor: By what they are multiplied.
        how: ``"multiplied"``, ``"assigned"``, ``"data"``, ``"infinite"``, ``"clipped"``, ``"foreach"``: at once, or
            ``"counted"``: by the square root of their number, too; ``"groups' data"``: what optimizers hold, by data.
    """

    module: int = 0
    factor: float = 0.5
    how: str = "multiplied"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditWeights:
    """Multiply by hand one parameter, counted round, ``"in place"`` or by other ``"data"``, or all in ``"groups"``.

    Attributes:
        module: Which module.
        which: Which parameter.
        factor: By what.
        how: In which way; ``"groups' data"`` is through ``data`` of what the module's optimizers hold.
        shown: Whether weights are looked at after it, which may hide that the next forward would miss it.
    """

    module: int = 0
    which: int
    factor: float = 0.9
    how: str = "in place"
    shown: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChangeLearningRate:
    """Multiply the learning rate of an optimizer's groups."""

    optimizer: int = 0
    factor: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class AddGroup:
    """Add to an optimizer the part it was made without, as a group with a learning rate and a decay of its own."""

    optimizer: int = 0
    rate: float = 0.02
    decay: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepScheduler:
    """Step an optimizer's learning rate scheduler."""

    optimizer: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Freeze:
    """Freeze a part of a module, or train it again."""

    module: int = 0
    part: str
    trained: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class HookGradients:
    """Multiply the gradients of a part's trained parameters from now on, in hooks."""

    module: int = 0
    part: str
    factor: float = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Initialize:
    """Draw a parameter, counted round, anew.

    Attributes:
        module: Which module.
        which: Which parameter.
        shown: As for ``EditWeights``.
        forgets: Whether optimizers forget its state.
        restarts: Whether what they have of its shape begins anew, with tensors of zeros that are as it is.
    """

    module: int = 0
    which: int
    shown: bool = True
    forgets: bool = False
    restarts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateAverage:
    """Add the first module's weights to their exponential moving average."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowAverage:
    """Evaluate the first module with the average for its weights, and show these."""

    key: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowWeights:
    """Show a module's weights, and every optimizer's state."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowParameters:
    """Show a module's parameters and buffers as ``full_parameters`` yields them on every rank."""

    module: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowGradients:
    """Show a module's gradients."""

    module: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadStateDict:
    """Load changed weights into a module with its own ``load_state_dict``; ``shown`` is as for ``EditWeights``."""

    module: int = 0
    factor: float = 0.95
    shown: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReloadOptimizer:
    """Load an optimizer's own ``state_dict()`` into it; ``shown`` is as for ``EditWeights``."""

    optimizer: int = 0
    shown: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduce:
    """Reduce a tensor over data ranks by ``"mean"``, ``"sum"`` or ``"max"``, ``"gather"`` it, or reduce ``"dict"``."""

    key: int
    how: str = "mean"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seed:
    """Seed all generators again."""

    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """Try what is known to be refused, then zero all gradients, seed all generators, and go on.

    None is drawn: a program that was refused is judged once more with the attempt in the place of what was ``refused``.
    """

    refused: Operation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate:
    """Evaluate on a data set of ``samples``, through a loader of the strategy's, and gather the outputs."""

    module: int = 0
    key: int
    samples: int
    batch_size: int = 2


Operation = (
    Backward
    | Forward
    | ClipNorm
    | ClipValue
    | Step
    | Closure
    | ZeroGrad
    | ZeroByHand
    | EditGradients
    | EditWeights
    | ChangeLearningRate
    | AddGroup
    | StepScheduler
    | Freeze
    | HookGradients
    | Initialize
    | UpdateAverage
    | ShowAverage
    | ShowWeights
    | ShowParameters
    | ShowGradients
    | LoadStateDict
    | ReloadOptimizer
    | Reduce
    | Seed
    | Save
    | Load
    | Fail
    | Attempt
    | SavePretrained
    | LoadWeights
    | Switch
    | Evaluate
)
