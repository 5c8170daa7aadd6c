"""What gradients still need before they are final: a denominator, unscaling, and agreement on overflow."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import InvalidOption, SetupError
from shard_core.gradients import LocalGradient, all_finite, are_alike, local_gradients, scale
from shard_core.optim.kernels import zeroing_one_by_one

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from shard_core.collectives.interface import Collectives
    from shard_core.mesh import DataRanks
    from shard_core.precision.scaler import GradientScaler
    from shard_core.strategy.registry import SetUpModule


_ZERO_GRAD = "zero_grad"


class Accumulation:
    """The gradients of one optimizer between two of its steps, or of a module that none was set up with.

    Engines average over data-parallel ranks; a denominator turns that average into the global mean,
    and a scaler's factor is taken out, once, when the gradients are first used.

    Attributes:
        by_backward: Whether a backward of the strategy has run since the gradients began anew, of whichever module.
        followed: Whether ``note_plain`` is told of gradients that come past those.
        shared: Whether its optimizer steps parameters of several modules.
    """

    def __init__(self) -> None:
        self.by_backward = False
        self.followed = self.shared = False
        self._through: Collection[int] = ()
        self._denominator: torch.Tensor | None = None
        self._loss_scale = 1.0
        self._backwards = 0
        self._shown = False
        self._final = False
        self._finite = True
        self._stepped = False
        self._past = False

    @property
    def waits(self) -> bool:
        """Whether gradients are there that are yet to be divided by denominators, or unscaled."""
        return self._backwards > 0 and not self._final and (self._denominator is not None or self._loss_scale != 1.0)

    @property
    def has_denominator(self) -> bool:
        """Whether earlier backwards of this step have denominators."""
        return self._denominator is not None

    @property
    def pending_factor(self) -> float | None:
        """What the losses were multiplied by whose gradients are yet to be unscaled; None if there are none."""
        return self._loss_scale if self._backwards and not self._final else None

    def check_adds_up(
        self, denominator: float | torch.Tensor | None, *, scaled: bool, through: Collection[int]
    ) -> None:
        """Check that a backward's gradients add up with those that are there, before it begins.

        Args:
            denominator: What the loss of this micro-batch is a sum over, on this rank.
            scaled: Whether the loss is to be multiplied by a gradient scaler's factor.
            through: The identities of those modules it comes through whose parameters the optimizer steps.

        Raises:
            SetupError: If the gradients were divided by denominators or unscaled already and not stepped since, or
                some of them have come past the strategy's ``backward``.
            InvalidOption: If only some micro-batches of a step have a denominator.
        """
        self._check_mixed(waits=self.waits or denominator is not None or scaled)
        if self._final and (denominator is not None or self.has_denominator or scaled):
            raise SetupError(
                "backward() after clipping would mix gradients that are divided by denominators, or unscaled, with "
                "some that are not yet; call optimizer_step() and zero_grad() first, and clip only after the last "
                "micro-batch."
            )
        if self._backwards and (self._denominator is None) != (denominator is None):
            raise InvalidOption(
                "some micro-batches of this step have a denominator and some have none; pass denominator= "
                "to every backward() of a step, or to none."
            )
        if self._backwards and denominator is not None and self._through != through:
            raise SetupError(
                "losses with denominators come through different modules whose parameters one optimizer steps, and "
                "their gradients would all be divided by the sum of these denominators; divide such losses yourself, "
                "or give each module an optimizer of its own."
            )

    def add(self, denominator: float | torch.Tensor | None, loss_scale: float, through: Collection[int] = ()) -> None:
        """Record one backward.

        Args:
            denominator: As ``check_adds_up`` takes it.
            loss_scale: What the loss was multiplied by.
            through: As ``check_adds_up`` takes it.
        """
        self._through = through
        self._backwards += 1
        self._final = False
        self._loss_scale = loss_scale
        if denominator is not None:
            count = torch.as_tensor(denominator, dtype=torch.float64).detach()
            self._denominator = count if self._denominator is None else self._denominator + count

    def finish(
        self,
        gradients: Callable[[], Sequence[LocalGradient]],
        collectives: Collectives,
        data: DataRanks,
        scaler: GradientScaler | None,
    ) -> bool:
        """Compute the final values of the gradients, in place and once.

        Args:
            gradients: Returns this rank's parts, to be changed in place.
            collectives: Of all ranks.
            data: The ranks whose denominators add up.
            scaler: The gradient scaler, if the precision has one.

        Returns:
            Whether every gradient on every rank is finite; always True without a scaler.

        Raises:
            SetupError: If no backward of the strategy has made them, and they differ between ranks; or if only some
                of them wait to be divided by denominators, or unscaled.
        """
        if self._final:
            return self._finite
        self._check_mixed(waits=self.waits)
        if not self.by_backward and not are_alike(gradients(), collectives):
            raise SetupError(
                "ranks are about to step with different gradients, and no strategy.backward has run since the last "
                "step or zero_grad(): what torch.autograd.grad returns is not averaged; call strategy.backward(loss, "
                "model), or assign gradients that are the same on every rank."
            )
        factor = self.factor(collectives, data)
        self._final = True
        if factor != 1.0:
            scale(gradients(), factor)
        if scaler is not None:
            self._finite = not collectives.any_true(not all_finite(gradients()))
        return self._finite

    def note_final(self, *, finite: bool) -> None:
        """Record that another optimizer over the same parameters has made their gradients final.

        Args:
            finite: Whether every gradient on every rank is finite.
        """
        self._final, self._finite = True, finite

    def factor(self, collectives: Collectives, data: DataRanks) -> float:
        """Return what the gradients are still to be multiplied by; every rank calls this.

        Args:
            collectives: Of all ranks.
            data: The ranks whose denominators add up.

        Returns:
            1.0 once they are final, the same on every rank.

        Raises:
            InvalidOption: If the denominators add up to nothing.
        """
        if self._final:
            return 1.0
        factor = 1.0 / self._loss_scale
        if self._denominator is not None:
            total = float(collectives.all_reduce(self._denominator, data.group, "sum"))
            if total <= 0:
                raise InvalidOption(
                    f"the denominators of this step add up to {total:g} over all ranks and micro-batches; "
                    "they must be counts above zero."
                )
            factor *= data.size / total
        return factor

    def check_zeroed(self, parameters: Iterable[torch.Tensor], collectives: Collectives) -> None:
        """Check that no gradients are left, of the last step or of others, where more would not add up with them.

        Those were divided by denominators or unscaled; what a backward adds is yet to be. Costs nothing after a
        ``zero_grad``, and a message the first time, and where gradients were zeroed by hand: some ranks may not have.

        Args:
            parameters: Whose gradients.
            collectives: Of all ranks, which call this alike.

        Raises:
            SetupError: If there are some on any rank.
        """
        if self.followed and not self._stepped:
            return
        # A sum, for XLA cannot tell over devices whether any of what it spreads over them is not zero.
        left = any(bool(each.tensor.abs().sum()) for each in local_gradients(parameters))
        if collectives.any_true(left):
            raise SetupError(
                "backward() after optimizer_step() would add gradients that are yet to be divided by denominators, or "
                "unscaled, to those of that step or of a loss.backward(); call zero_grad() in between."
            )
        self._stepped = False

    def note_plain(self) -> None:
        """Record that a gradient has come past the strategy's ``backward``, to be neither divided nor unscaled."""
        self._past = True

    def _check_mixed(self, *, waits: bool) -> None:
        if self._past and waits:
            raise SetupError(
                "loss.backward() has added gradients to those of losses with a denominator, or under a gradient "
                "scaler, by which all would be divided; call strategy.backward(loss, model) for every loss, and "
                "zero_grad() to begin the step anew."
            )

    def note_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Record, after a backward, whether there are gradients to be seen: an engine may have deferred them.

        Args:
            parameters: Whose gradients.
        """
        self._shown = has_gradients(parameters)

    def reset_if_discarded(self, parameters: Iterable[torch.Tensor]) -> None:
        """Reset if the gradients of earlier backwards were to be seen, or clipped, and are gone without a step.

        Args:
            parameters: Whose gradients.
        """
        if (self._shown or self._final or self._past) and not has_gradients(parameters):
            self.reset()

    def reset(self) -> None:
        """Forget all backwards, as where gradients are zeroed."""
        self.by_backward = False
        self._denominator = None
        self._loss_scale = 1.0
        self._backwards = 0
        self._shown = False
        self._final = False
        self._finite = True
        self._stepped = False
        self._past = False

    def note_step(self) -> None:
        """Forget all backwards; their gradients, divided and unscaled, stay until they are zeroed."""
        self.reset()
        self._stepped = True


def stepped_by(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """List what an optimizer steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def check_strange(optimizer: torch.optim.Optimizer, known: SetUpModule) -> None:
    """Check that an optimizer that was not set up steps nothing of a module that it would train wrong, or not at all.

    Args:
        optimizer: One of plain PyTorch's.
        known: What was set up.

    Raises:
        SetupError: If gradients of what it steps are not final, or no loss reaches it any more.
    """
    stepped = stepped_by(optimizer)
    if known.waits and not known.known.isdisjoint(stepped):
        wrong = "parameters whose gradients are yet to be divided by denominators or unscaled"
    elif any(each in known.names and each not in known.known for each in stepped):
        wrong = "parameters that setup has replaced in the module, so that no loss reaches them"
    else:
        return
    raise SetupError(
        f"this {type(optimizer).__name__} was not set up, and steps {wrong}; pass it to setup_module_and_optimizers() "
        "with its module, or to setup_optimizer()."
    )


def note_guests(modules: Sequence[SetUpModule]) -> None:
    """Note which optimizers were given groups of other modules' parameters, whose gradients count for them, too.

    Args:
        modules: All that were set up.

    Raises:
        SetupError: If such gradients wait to be divided by denominators, or unscaled, as the module's own.
    """
    if len(modules) == 1:
        return
    for known in modules:
        for optimizer, accumulation in known.optimizers.items():
            strange = set(stepped_by(optimizer)) - known.known
            for other in modules if strange else ():
                if other is known or optimizer in other.guests or strange.isdisjoint(other.known):
                    continue
                if other.waits:
                    raise SetupError(
                        "an optimizer was given parameters of another module while their gradients are yet to be "
                        "divided by denominators or unscaled; call add_param_group() before the first backward of a "
                        "step."
                    )
                other.guests[optimizer], accumulation.shared = accumulation, True


def twins(optimizer: torch.optim.Optimizer, modules: Iterable[SetUpModule]) -> list[Accumulation]:
    """List what gradients still need for other optimizers over the same parameters, which become final with them.

    Args:
        optimizer: Whose gradients are about to become final.
        modules: All that were set up.

    Raises:
        SetupError: If another steps only some of them: the others would be divided, or unscaled, once more.
    """
    mine, found = set(stepped_by(optimizer)), []
    for known in modules:
        for other, accumulation in known.optimizers.items():
            theirs = set(stepped_by(other)) if other is not optimizer else set()
            if mine == theirs:
                found.append(accumulation)
            elif not mine.isdisjoint(theirs):
                raise SetupError(
                    "two optimizers step some parameters both, and others not, so that gradients would be divided by "
                    "denominators, or unscaled, once for each; give them the same parameters, or none in common."
                )
    return found


def has_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether any of some parameters has a gradient."""
    return any(parameter.grad is not None for parameter in parameters)


class NotedZeroGrad:
    """What a module or an optimizer has in place of its ``zero_grad``; a copy has its class's again.

    Gradients that are zero need not have been zeroed: a loss may have no slope, and its denominator counts.

    Args:
        owner: The module or optimizer.
        note: Called after each ``zero_grad``.
        before: Called before each.
    """

    def __init__(
        self,
        owner: torch.nn.Module | torch.optim.Optimizer,
        note: Callable[[], None],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._owner = owner
        self._note, self._before = note, before
        functools.update_wrapper(self, getattr(owner, _ZERO_GRAD))
        vars(owner)[_ZERO_GRAD] = self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Zero gradients as the class's method does, also of groups that were added meanwhile."""
        owner = self._owner
        self._before()
        with zeroing_one_by_one(owner) if isinstance(owner, torch.optim.Optimizer) else contextlib.nullcontext():
            self.__wrapped__(*args, **kwargs)  # type: ignore[attr-defined]  # from update_wrapper
        self._note()

    def remove(self) -> None:
        """Restore the method of the class."""
        if vars(self._owner).get(_ZERO_GRAD) is self:
            del vars(self._owner)[_ZERO_GRAD]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes, in a copy, the method of the copy's class."""
        return getattr, (self._owner, _ZERO_GRAD)
