"""What a comparison comes to: the first parameter that differs, and its likely cause."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shard_core.parity.comparison import share_a_factor

if TYPE_CHECKING:
    import torch

    from shard_core.parity.comparison import Row
    from shard_core.parity.plain import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Runs:
    """The runs that were compared.

    Attributes:
        mine: The strategy's.
        truth: Plain PyTorch's on the whole batch.
        data_ranks: Into how many parts the strategy split it.
    """

    mine: Run
    truth: Run
    data_ranks: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class InParts:
    """Plain PyTorch on the parts of the batch, where that is not the same as on the whole.

    Attributes:
        run: The run, on the mean of the parts' losses.
        rows: The strategy's run against it.
        count: How many parts.
    """

    run: Run
    rows: Sequence[Row]
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """The text under the table.

    Attributes:
        same: Whether nothing differs.
        first: The first parameter that differs, if one does.
        says: One or two sentences.
    """

    same: bool
    first: str | None
    says: str


def judge(
    rows: Sequence[Row], runs: Runs, in_parts: InParts | None, model: torch.nn.Module, tolerance: float
) -> Verdict:
    """Report what differs and why.

    Args:
        rows: The strategy against plain PyTorch.
        runs: What the rows were made from.
        in_parts: Plain PyTorch on the parts, if that differs from the whole.
        model: The user's, to look for what explains a difference.
        tolerance: How well a factor must fit.

    Returns:
        The verdict.
    """
    if all(row.same for row in rows):
        return Verdict(same=True, first=None, says="The strategy trains this model as plain PyTorch does.")
    by_name = {row.what: row for row in rows}
    many = [by_name[what] for what in ("gradients", "weight updates") if what in by_name and not by_name[what].same]
    first = many[0].differing[0] if many else None
    where = (
        _where(many[0], model) if many else f"{next(row.what for row in rows if not row.same)} is the first to differ."
    )
    if in_parts is not None and all(row.same for row in in_parts.rows):
        return Verdict(same=False, first=first, says=f"{where} {_not_a_mean(runs.truth, in_parts, model, tolerance)}")
    return Verdict(same=False, first=first, says=f"{where} {_fault(by_name, runs, tolerance)}")


def _where(row: Row, model: torch.nn.Module) -> str:
    """Return the first parameter that differs, under all its names."""
    first = row.differing[0]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [name for name, each in parameters.items() if each is parameters[first] and name != first]
    tied = f" (tied to {', '.join(names)})" if names else ""
    which = f"is the first of {len(row.differing)} that differ" if len(row.differing) > 1 else "differs"
    what = "gradient" if row.what == "gradients" else "update"
    return f"The {what} of {first!r}{tied} {which}."


def _not_a_mean(whole: Run, in_parts: InParts, model: torch.nn.Module, tolerance: float) -> str:
    """Explain a difference that plain PyTorch shows as well when it trains on the parts."""
    count, loss = in_parts.count, in_parts.run.losses[0]
    it_is = (
        f"It is not the strategy: plain PyTorch differs alike when it averages the losses of the batch's {count} parts."
    )
    factor = whole.losses[0] / loss if loss else math.nan
    if abs(factor - count) <= count * tolerance:
        return (
            f"{it_is} The loss of the whole is {count} times that mean, so it is a sum over samples; return a "
            "mean, or hand the sum to backward() with denominator=."
        )
    if any(module.training and "BatchNorm" in type(module).__name__ for module in model.modules()):
        return (
            f"{it_is} The model has batch normalisation in training mode, whose statistics are those of a rank's part; "
            "torch.nn.SyncBatchNorm takes them over all ranks."
        )
    return (
        f"{it_is} The loss is no mean over samples: the parts weigh alike, though they may count different numbers of "
        "tokens or labels; return the sum and hand it to backward() with denominator= and the count."
    )


def _fault(rows: Mapping[str, Row], runs: Runs, tolerance: float) -> str:
    """Return what in the strategy, or in how it was set up, would look like this."""
    if "gradients" in rows and not rows["gradients"].same:
        return _gradient_fault(rows, runs, tolerance)
    if not rows["loss, step 1"].same:
        return (
            "The first loss differs though no step was taken: look for buffers or weights that setup changed, or for "
            "dropout and other randomness in forward."
        )
    if not rows["gradient norm, step 1"].same:
        return (
            "The gradients are right and their norm is not: it is that of one rank's shard, or counts parameters twice."
        )
    return (
        "Losses and gradients begin the same, so it is the step: an optimizer that looks at whole tensors and is given "
        "shards, or settings of its parameter groups that setup lost."
    )


def _gradient_fault(rows: Mapping[str, Row], runs: Runs, tolerance: float) -> str:
    missing = [name for name in runs.truth.gradients if name not in runs.mine.gradients]
    if missing:
        return f"{missing[0]!r} has no gradient under the strategy: forward went round what setup returned."
    factor = share_a_factor(runs.mine.gradients, runs.truth.gradients, tolerance)
    count = runs.data_ranks
    if factor is not None and abs(factor - 1.0) > tolerance:
        known = {
            float(count): f"they are summed over the {count} data ranks where they should be averaged",
            1.0 / count: "they are averaged twice, or not summed",
        }
        near = [says for right, says in known.items() if abs(factor - right) <= tolerance * right]
        return (
            f"Every gradient is {factor:.4g} times plain PyTorch's: {near[0] if near else 'something rescales them'}."
        )
    if not rows["loss, step 1"].same:
        return (
            "The loss differs before any step, so forward already does: look for buffers or weights that setup "
            "changed, another precision than was asked for, or randomness such as dropout."
        )
    if len(rows["gradients"].differing) == len(runs.truth.gradients):
        return "All gradients differ and no factor explains it: each rank may have kept its own, unaveraged."
    return (
        "The other gradients are right: look at what is special about the module it belongs to, such as tied weights, "
        "a use outside forward, an own backward, or a dimension that does not divide over the ranks."
    )
