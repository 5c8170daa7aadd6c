"""Holding a run under a strategy against plain PyTorch's, with what plain PyTorch itself is uncertain of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from shard_core.parity.plain import Run, norm_of

#: How far the strategy may be from plain PyTorch, in multiples of how far plain PyTorch is from itself.
NOISE = 10.0
#: What a parameter with a tiny gradient or update is measured by: this share of the model's typical one.
_FLOOR = 0.1
#: How many roundings of a weight are no difference of its update.
_ROUNDINGS = 4.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity of two runs.

    Attributes:
        what: What was compared.
        plain: Plain PyTorch's number; None for a quantity of many.
        strategy: The strategy's.
        difference: The largest relative difference.
        allowed: The largest that is allowed where it was found.
        differing: The parameters, or the quantity itself, that differ by more.
    """

    what: str
    plain: float | None = None
    strategy: float | None = None
    difference: float
    allowed: float
    differing: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Return whether nothing differs by more than is allowed."""
        return not self.differing


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yardstick:
    """What a right run may differ by.

    Attributes:
        tolerance: The relative difference that is always allowed.
        again: The batch trained on in plain PyTorch once more, its sums in another order; what differs there
            is rounding. None where that is not known.
        initial: The weights both runs began with.
    """

    tolerance: float
    again: Run | None
    initial: Mapping[str, torch.Tensor]


def compare(mine: Run, truth: Run, yardstick: Yardstick) -> list[Row]:
    """Compare losses, gradient norms, gradients and weights.

    Args:
        mine: The strategy's run.
        truth: Plain PyTorch's.
        yardstick: What is allowed.

    Returns:
        The rows of the table, in the order in which a fault would show.
    """
    again = yardstick.again
    rows = _numbers("loss", mine.losses, truth.losses, again.losses if again else None, yardstick.tolerance)
    rows += _numbers("gradient norm", mine.norms, truth.norms, again.norms if again else None, yardstick.tolerance)
    if truth.gradients:
        rows.append(_row("gradients", lambda run: gradient_differences(run, truth), mine, yardstick))
    rows.append(_row("weight updates", lambda run: _update_differences(run, truth, yardstick.initial), mine, yardstick))
    return rows


def gradient_differences(run: Run, truth: Run) -> dict[str, float]:
    """Measure how far each parameter's first gradient is from the true one, relative to its size.

    Args:
        run: The run to measure.
        truth: The true one.

    Returns:
        By parameter, in the model's order; infinite where a gradient is missing or of another shape.
    """
    sizes = _sizes(truth.gradients)
    return {
        name: _distance(run.gradients.get(name), gradient) / sizes[name] if sizes[name] else 0.0
        for name, gradient in truth.gradients.items()
    }


def share_a_factor(mine: Mapping[str, torch.Tensor], truth: Mapping[str, torch.Tensor], bound: float) -> float | None:
    """Find the one factor between two sets of tensors, if there is one.

    Args:
        mine: One set, by name.
        truth: The other.
        bound: How well it must fit, relative.

    Returns:
        What ``truth`` is multiplied by, or None.

    Example:
        >>> share_a_factor({"w": torch.tensor([2.0, 4.0])}, {"w": torch.tensor([1.0, 2.0])}, 1e-6)
        2.0
    """
    if any(name not in mine or mine[name].shape != tensor.shape for name, tensor in truth.items()):
        return None
    dot = sum(float((mine[name].double() * tensor.double()).sum()) for name, tensor in truth.items())
    square = sum(float(tensor.double().square().sum()) for tensor in truth.values())
    if not square or not math.isfinite(dot):
        return None
    factor = dot / square
    rest = norm_of(mine[name].double() - factor * tensor.double() for name, tensor in truth.items())
    return factor if float(rest) <= bound * abs(factor) * math.sqrt(square) else None


def _numbers(
    what: str, mine: Sequence[float], truth: Sequence[float], again: Sequence[float] | None, tolerance: float
) -> list[Row]:
    rows = []
    for step, (found, right) in enumerate(zip(mine, truth, strict=True)):
        noise = _relative(again[step], right) if again else 0.0
        difference, allowed = _relative(found, right), max(tolerance, NOISE * noise)
        name = f"{what}, step {step + 1}"
        differing = () if difference <= allowed else (name,)
        rows.append(
            Row(what=name, plain=right, strategy=found, difference=difference, allowed=allowed, differing=differing)
        )
    return rows


def _row(what: str, measure: Callable[[Run], dict[str, float]], mine: Run, yardstick: Yardstick) -> Row:
    """Compare parameter by parameter; the row shows the one that is furthest beyond what it may be."""
    differences = measure(mine)
    noise = measure(yardstick.again) if yardstick.again else {}
    allowed = {name: max(yardstick.tolerance, NOISE * noise.get(name, 0.0)) for name in differences}
    differing = tuple(name for name in differences if not differences[name] <= allowed[name])
    worst = max(differences, key=lambda name: differences[name] / allowed[name])
    return Row(what=what, difference=differences[worst], allowed=allowed[worst], differing=differing)


def _update_differences(run: Run, truth: Run, initial: Mapping[str, torch.Tensor]) -> dict[str, float]:
    updates = {name: weight.double() - initial[name].double() for name, weight in truth.weights.items()}
    sizes = _sizes(updates)
    differences = {}
    for name, weight in truth.weights.items():
        roundings = _ROUNDINGS * torch.finfo(weight.dtype).eps * float(torch.linalg.vector_norm(weight.double()))
        beyond = max(0.0, _distance(run.weights.get(name), weight) - roundings)
        differences[name] = beyond / sizes[name] if sizes[name] else math.inf * beyond if beyond else 0.0
    return differences


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Measure tensors by their norms, tiny ones by what is typical in the model: below that is rounding."""
    elements = sum(tensor.numel() for tensor in tensors.values())
    typical = float(norm_of(tensors.values())) / math.sqrt(max(1, elements))
    return {
        name: float(norm_of([tensor])) + _FLOOR * typical * math.sqrt(tensor.numel())
        for name, tensor in tensors.items()
    }


def _distance(mine: torch.Tensor | None, truth: torch.Tensor) -> float:
    if mine is None or mine.shape != truth.shape:
        return math.inf
    distance = float(torch.linalg.vector_norm(mine.double() - truth.double()))
    return math.inf if math.isnan(distance) else distance


def _relative(mine: float, truth: float) -> float:
    if mine == truth:
        return 0.0
    difference = abs(mine - truth) / abs(truth) if truth else math.inf
    return math.inf if math.isnan(difference) else difference
