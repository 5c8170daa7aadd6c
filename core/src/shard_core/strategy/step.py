"""One training step: deferred sync, backward, clipping, the optimizer's step."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shard_core.capability import Capability
from shard_core.collectives.process_group import translate_torch_errors
from shard_core.errors import InvalidOption, NonFiniteGradient, SetupError
from shard_core.gradients import clip_norm, clip_values, total_norm
from shard_core.options import check_names
from shard_core.strategy.accumulation import note_guests, twins
from shard_core.strategy.loss_graph import reached_by
from shard_core.strategy.setup import StrategySetup

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from shard_core.precision.scaler import GradientScaler
    from shard_core.strategy.accumulation import Accumulation
    from shard_core.strategy.registry import SetUpModule

log = logging.getLogger(__name__)

#: Keywords of ``Tensor.backward`` that only some engines honour, and what to do under the others.
_ONLY_SOME_ENGINES = {
    "create_graph": "ranks' gradients are averaged outside of any graph; for second derivatives take the gradient by "
    "inputs, torch.autograd.grad(outputs, inputs, create_graph=True), and add what you make of it to the loss",
    "inputs": "gradients of all parameters are averaged together; torch.autograd.grad gives those of activations, and "
    "requires_grad_(False) before setup leaves parameters out",
}


class StrategyStep(StrategySetup):
    """Turns losses into steps, with the same meaning of a gradient on every engine."""

    _logged_sync = False

    def no_backward_sync(
        self, module: torch.nn.Module, enabled: bool = True
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context for all but the last micro-batch, in which gradients may stay on their rank.

        Forward and backward both belong inside. Gradients are the same with and without it, under every strategy; one
        that sends them in every backward all the same logs so, once. No step follows a backward inside. Until the next
        backward, ``zero_grad`` may throw gradients away, all of them; where another change would not reach them, a
        strategy refuses to go on, and throws them away, too. A loss may come through several modules, whichever
        ``backward`` names: each waits for a backward outside of its own context.

        Args:
            module: What setup returned.
            enabled: False for a context that does nothing, under every strategy.
        """
        known = self._registry.of(module)
        if not enabled:
            return contextlib.nullcontext()
        defers = self.engine_defers_sync
        if not defers:
            self._log_sync()
        return self._inside_no_sync(known, defers)

    def backward(
        self,
        loss: torch.Tensor,
        module: torch.nn.Module,
        *,
        denominator: float | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the gradients of a loss, averaged over data-parallel ranks and summed over calls; every rank calls this.

        Nothing is divided by the number of micro-batches: divide the loss, as everywhere. With a
        denominator the loss is a sum, and the gradients become those of
        ``sum of losses / sum of denominators`` over all ranks and all calls since the last step: those of every module
        that the loss reaches, if it runs through several.

        A tensor that is no scalar, such as what one stage of a pipeline handed to the next, takes the
        ``gradient`` that the next one has by it, as ``Tensor.backward`` does: that is a backward of
        ``(loss * gradient).sum()``.

        Where an exception ends a backward, a lack of memory or one of a hook, all gradients are thrown away, of every
        module and earlier call too: the run goes on, if it ended so on every rank, with a step that begins anew.

        Args:
            loss: A scalar; the mean over this rank's samples, or their sum with a denominator. Or any
                tensor, with its ``gradient``.
            module: What setup returned; one of them, if the loss runs through several.
            denominator: What the loss sums over on this rank, e.g. a number of tokens.
            kwargs: Passed to ``Tensor.backward``: ``gradient``, of the tensor's shape, and ``retain_graph``.

        Raises:
            InvalidOption: If the loss or a keyword is not one to go backward with.
        """
        self._registry.leave_abandoned()
        known = self._registry.of(module)
        self._check_keywords(kwargs)
        _check_loss(loss, kwargs.get("gradient"))
        if denominator is not None:
            self._require(Capability.DENOMINATOR)
        for name, parameter in known.frozen.items():
            if parameter.requires_grad:
                self._require(
                    Capability.UNFREEZE,
                    f"{name!r} was frozen at setup and no longer is; save a checkpoint and load it into a module that "
                    "is set up with it unfrozen",
                )
        known.rescaled.check_frozen()
        note_guests(list(self._registry))
        scaler = self.precision.scaler
        reached = [known, *self._also_reached(loss, known, denominator)]
        for each in reached:
            self.engine_follow_gradients(each.module)
        factor = self._count(reached, denominator)
        self._registry.note_backward()
        self._in_backward = True
        try:
            with _explained(loss), translate_torch_errors("a backward", among_others=True):
                self.engine_backward(loss * factor if scaler else loss, known.callable, **kwargs)
        except BaseException:
            self.engine_drop_unfinished()
            for each in self._registry:
                each.drop_gradients()
            raise
        finally:
            self._in_backward = False
        for each in reached:
            each.note_gradients(self._on_plain_gradient)

    def _count(self, reached: Sequence[SetUpModule], denominator: float | torch.Tensor | None) -> float:
        """Count a backward for the optimizers over modules that a loss comes through; return what to multiply it by."""
        scaler = self.precision.scaler
        through: dict[Accumulation, set[int]] = {}  # hooks hold these, and are to hold no module
        for each in reached:
            for parameters, accumulation in each.accumulations():
                if accumulation not in through:
                    if denominator is not None or scaler is not None:
                        accumulation.check_zeroed(parameters, self.collectives)
                    accumulation.reset_if_discarded(parameters)
                through.setdefault(accumulation, set()).add(id(each))
        for accumulation, modules in through.items():
            accumulation.check_adds_up(denominator, scaled=scaler is not None, through=modules)
        factor = _factor(scaler, through) if scaler else 1.0
        for accumulation, modules in through.items():
            accumulation.add(denominator, factor, modules)
        return factor

    def clip_gradients_norm(
        self,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Scale an optimizer's gradients down so that their global norm is at most ``max_norm``; every rank calls this.

        Args:
            module: What setup returned.
            optimizer: Whose gradients.
            max_norm: The bound.
            norm_type: Which p-norm.
            error_if_nonfinite: Raise on a non-finite norm; under a gradient scaler the norm is
                returned instead and the coming step is skipped.

        Returns:
            The norm before clipping, a 0-d tensor, the same on every rank.

        Raises:
            NonFiniteGradient: If the norm is infinite or not a number.
        """
        if norm_type != 2.0:
            self._require(Capability.CLIP_ANY_NORM)
        self._registry.of(module)
        finite = self._finish(optimizer)
        gradients = self.engine_gradients(optimizer)
        norm = total_norm(gradients, float(norm_type), self.collectives)
        overflowed = self.precision.scaler is not None and not finite
        if error_if_nonfinite and not overflowed and not self.engine_look(norm.isfinite()):
            raise NonFiniteGradient(
                f"the gradient norm is {norm.item()}; look for a loss that is not finite, or pass "
                "error_if_nonfinite=False to clip all the same."
            )
        clip_norm(gradients, max_norm, norm)
        return norm

    def clip_gradients_value(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Clamp every element of an optimizer's gradients to ``[-clip_val, clip_val]``; every rank calls this.

        Args:
            module: What setup returned.
            optimizer: Whose gradients.
            clip_val: The bound.
        """
        self._require(Capability.CLIP_VALUE)
        self._registry.of(module)
        self._finish(optimizer)
        clip_values(self.engine_gradients(optimizer), clip_val)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, **kwargs: Any
    ) -> bool:
        """Step an optimizer, unless a gradient scaler found an overflow on any rank; every rank calls this.

        ``optimizer.step()`` does the same, and returns what it returns without a strategy. Each waits until an async
        save has copied what the step changes.

        Args:
            optimizer: One that was set up.
            closure: Evaluates the loss again: zeroes gradients, runs forward and ``backward``. What it does not zero
                adds up, as ever.
            kwargs: Passed to the optimizer.

        Returns:
            Whether it stepped; the same on every rank.

        Raises:
            CheckpointError: If an async save failed; nothing was stepped.
        """
        self._saves.begin_step()
        known = self._registry.owner(optimizer)
        known.check_known(optimizer, self._registry, self.world_size)
        self._check_steps_dense(known, optimizer)
        if closure is None:
            finite = self._finish(optimizer)
            if self.precision.scaler is not None:
                self.precision.scaler.record(finite=finite)
            if finite:
                self._engine_step(optimizer, None, kwargs)
            else:
                self.engine_skip_step(optimizer)
            known.note_step(optimizer)
            return finite
        self._require(Capability.CLOSURE)
        if self.precision.scaler is not None:
            raise InvalidOption(
                f"a closure cannot be combined with precision {self.precision.policy.name!r}, whose scaler may skip "
                "the step; use 'bf16-mixed' or '32-true'."
            )

        def evaluate() -> Any:
            loss = closure()
            self._finish(optimizer)
            return loss

        self._engine_step(optimizer, evaluate, kwargs)
        known.note_step(optimizer)
        return True

    def _engine_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]
    ) -> None:
        opened = self._registry.owner(optimizer).routed[optimizer].opened()
        with opened, translate_torch_errors("a step", among_others=True):
            self.engine_step(optimizer, closure, **kwargs)

    def _step_by_hand(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None) -> None:
        """Step an optimizer whose user has called its ``step``, as may an ``optimizer_step`` around this class's."""
        StrategyStep.optimizer_step(self, optimizer, closure)

    def _on_plain_gradient(self, parameter: torch.Tensor, called: Callable[[], None]) -> RemovableHandle | None:
        """Have a function called whenever a parameter gets a gradient that no ``backward`` of the strategy's makes."""
        owner = weakref.ref(self)  # no garbage collector sees what such a hook holds

        def call(_: torch.Tensor) -> None:
            strategy = owner()
            if strategy is not None and not strategy._in_backward:
                called()

        return self.engine_on_gradient(parameter, call)

    def _check_keywords(self, keywords: Mapping[str, Any]) -> None:
        """Refuse what the engine does not honour, but not its default."""
        asked = {
            name: value
            for name, value in keywords.items()
            if name not in _ONLY_SOME_ENGINES or not (value is None or value is False)
        }
        check_names(
            f"backward of strategy {self.info.name!r}", asked, type(self).engine_backward_keywords, _ONLY_SOME_ENGINES
        )

    def _also_reached(
        self, loss: torch.Tensor, named: SetUpModule, denominator: float | torch.Tensor | None
    ) -> list[SetUpModule]:
        """List the other modules that a loss gives gradients on any rank, where those still need something."""
        others = [each for each in self._registry if each is not named]
        pending = (accumulation for each in others for _, accumulation in each.accumulations())
        if not others or (
            denominator is None
            and self.precision.scaler is None
            and not any(accumulation.has_denominator for accumulation in pending)
        ):
            return []
        mine = torch.tensor(reached_by(loss, [each.module for each in others]), dtype=torch.int32)
        anywhere = self.collectives.all_reduce(mine, reduce_op="max").tolist()
        return [each for each, reached in zip(others, anywhere, strict=True) if reached]

    @contextlib.contextmanager
    def _inside_no_sync(self, known: SetUpModule, defers: bool) -> Iterator[None]:
        before, known.inside_no_sync = known.inside_no_sync, True
        try:
            # Engines are spared contexts in one another, of which the inner one would end what the outer one began.
            with self.engine_no_sync(known.callable) if defers and not before else contextlib.nullcontext():
                yield
        finally:
            known.inside_no_sync = before

    def _log_sync(self) -> None:
        """Log, once and on rank 0, that no traffic is saved."""
        if self.is_global_zero and not self._logged_sync:
            log.warning(
                "strategy %r sends gradients in every backward, inside no_backward_sync too: the gradient is the same, "
                "and no traffic is saved.",
                self.info.name,
            )
        self._logged_sync = True

    def gradients_wait(self, module: torch.nn.Module) -> bool:
        """Return whether a module's gradients are yet to be divided by denominators, or unscaled.

        Clipping and stepping do so first; until then what stands in ``.grad``, and its norm, is another.

        Args:
            module: The user's, set up.
        """
        known = self._registry.find(module)
        return known is not None and known.waits

    def _finish(self, optimizer: torch.optim.Optimizer) -> bool:
        """Compute the final values of an optimizer's gradients; return whether all are finite."""
        known = self._registry.owner(optimizer)
        known.check_averaged()
        self.engine_check_averaged(optimizer)
        accumulation = known.optimizers[optimizer]
        alike = twins(optimizer, self._registry) if accumulation.waits else []
        finite = accumulation.finish(
            lambda: self.engine_gradients(optimizer), self.collectives, self._data, self.precision.scaler
        )
        for each in alike:
            each.note_final(finite=finite)
        return finite


def _factor(scaler: GradientScaler, accumulations: Iterable[Accumulation]) -> float:
    """Return what to multiply a loss by: as earlier losses whose gradients it adds to, though a step has changed that.

    Raises:
        SetupError: If it comes through several modules whose gradients wait for other factors.
    """
    factor = scaler.begin_backward()
    pending = {each.pending_factor for each in accumulations if each.pending_factor is not None}
    if len(pending) > 1:
        raise SetupError(
            "a loss comes through modules whose gradients were multiplied by different factors, since an optimizer has "
            "skipped a step between their backwards; step or zero the gradients of all of them first."
        )
    return next(iter(pending), factor)


@contextlib.contextmanager
def _explained(loss: torch.Tensor) -> Iterator[None]:
    """Translate torch's error of a loss that mixes what parameters spread over ranks gave with what forward did."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(loss, DTensor) or "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise SetupError(
            "the loss is a DTensor, for a part of it was computed from parameters that are spread over ranks; take the "
            "optimizer's weight_decay for an L2 penalty, or call strategy.backward for each parameter's part by itself."
        ) from error


def _check_loss(loss: object, gradient: object) -> None:
    if not isinstance(loss, torch.Tensor):
        raise InvalidOption(f"the loss is of type {type(loss).__name__}; give a scalar tensor.")
    if gradient is None and loss.numel() != 1:
        advice = "reduce it to a scalar, e.g. with .mean(), or pass gradient=, what a later gradient by it is"
        if not loss.numel():
            advice = "compute it in the module's forward: outside, engines that spread parameters may have empty ones"
        raise InvalidOption(f"the loss has shape {tuple(loss.shape)}; {advice}.")
    if gradient is not None:
        if not isinstance(gradient, torch.Tensor):
            raise InvalidOption(f"gradient is of type {type(gradient).__name__}; give a tensor of the loss's shape.")
        if gradient.shape != loss.shape:
            raise InvalidOption(
                f"gradient has shape {tuple(gradient.shape)}, and the loss has shape {tuple(loss.shape)}; they must be "
                "the same."
            )
    if not loss.requires_grad:
        raise InvalidOption(
            "the loss has no gradient to follow; compute it from the module's output outside torch.no_grad()."
        )
