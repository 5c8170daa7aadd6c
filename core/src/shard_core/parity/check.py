"""The parity check from end to end."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import InvalidOption
from shard_core.parity import plain
from shard_core.parity.batch import part_of, reversed_samples, to_device
from shard_core.parity.comparison import Row, Yardstick, compare
from shard_core.parity.ranks import run_under
from shard_core.parity.verdict import InParts, Runs, Verdict, judge
from shard_core.precision.policies import POLICIES

if TYPE_CHECKING:
    from shard_core.parity.recipe import Recipe
    from shard_core.strategy import Strategy

#: The relative difference that is always allowed, by precision.
TOLERANCES = {
    "64-true": 1e-9,
    "32-true": 1e-4,
    "16-mixed": 1e-2,
    "16-true": 2e-2,
    "bf16-mixed": 2e-2,
    "bf16-true": 1e-1,
}
#: By how much of itself the first step of SGD changes the weights, all taken as one.
_FIRST_CHANGE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What the check found.

    Attributes:
        rows: The table.
        verdict: What it comes to.
        data_ranks: Over how many ranks the batch was split.
    """

    rows: list[Row]
    verdict: Verdict
    data_ranks: int


def check(
    recipe: Recipe,
    make_strategy: Callable[[], Strategy],
    *,
    precision: str,
    device: torch.device,
    tolerance: float | None,
    announce: Callable[[str], None],
) -> Result:
    """Train the user's model in plain PyTorch and under a strategy, and compare.

    Args:
        recipe: How.
        make_strategy: Builds the strategy anew; nothing is started by it.
        precision: A name of the table of precisions.
        device: Where plain PyTorch trains.
        tolerance: The relative difference that is allowed; None for the precision's own.
        announce: Called with what is being done.

    Returns:
        What was found.

    Raises:
        InvalidOption: If the model, the batch or the loss cannot be used.
        RankFailed: If the strategy fails.
    """
    bound = TOLERANCES[precision] if tolerance is None else tolerance
    announce("plain PyTorch")
    model = recipe.prepare()
    numbers = _numbers(precision)
    initial = {name: weight.detach().to(numbers.parameter, copy=True) for name, weight in model.named_parameters()}
    recipe = dataclasses.replace(recipe, rate=_rate(recipe, initial, device))
    _check_repeatable(recipe, device)
    batch = recipe.batch()
    truth = _plain(recipe, [batch], numbers, device)
    announce("the strategy")
    mine, data_ranks = run_under(make_strategy(), recipe)
    if recipe.optimizer != "sgd":
        probe = dataclasses.replace(recipe, optimizer="sgd")
        mine.gradients.update(run_under(make_strategy(), probe)[0].gradients)
    announce("plain PyTorch, in another order")
    parts = [part_of(batch, rank, data_ranks) for rank in range(data_ranks)]
    if data_ranks == 1:
        parts = [reversed_samples(batch)]
    again = _plain(recipe, parts, numbers, device)
    is_mean = data_ranks == 1 or _agree(again, truth, bound)
    yardstick = Yardstick(tolerance=bound, again=again if is_mean else None, initial=initial)
    rows = compare(mine, truth, yardstick)
    in_parts = None if is_mean else InParts(run=again, rows=compare(mine, again, yardstick), count=data_ranks)
    runs = Runs(mine=mine, truth=truth, data_ranks=data_ranks)
    return Result(rows=rows, verdict=judge(rows, runs, in_parts, model, bound), data_ranks=data_ranks)


def _plain(recipe: Recipe, parts: list[Any], numbers: plain.Numbers, device: torch.device) -> plain.Run:
    on_device = [to_device(part, device) for part in parts]
    model = recipe.model().to(device)
    return plain.train(model, recipe.make_optimizer, recipe.loss_of, on_device, steps=recipe.steps, numbers=numbers)


def _rate(recipe: Recipe, initial: Mapping[str, torch.Tensor], device: torch.device) -> float:
    """Choose SGD's learning rate by what it does to the weights: losses and models come in all sizes."""
    once = dataclasses.replace(recipe, optimizer="sgd", steps=1)
    run = _plain(once, [recipe.batch()], plain.Numbers(), device)
    if not math.isfinite(run.losses[0]) or not math.isfinite(run.norms[0]):
        raise InvalidOption(
            f"in plain PyTorch the loss is {run.losses[0]} and its gradient norm {run.norms[0]}; there is nothing to "
            "compare with."
        )
    if not run.norms[0]:
        raise InvalidOption("in plain PyTorch no parameter gets a gradient other than 0; the loss depends on none.")
    return _FIRST_CHANGE * float(plain.norm_of(initial.values())) / run.norms[0]


def _check_repeatable(recipe: Recipe, device: torch.device) -> None:
    """Refuse a model that draws random numbers in eval mode: no two runs of it would be alike."""
    if recipe.train_mode:
        return
    one, other = (
        _plain(dataclasses.replace(recipe, steps=1, seed=seed), [recipe.batch()], plain.Numbers(), device).losses[0]
        for seed in (recipe.seed, recipe.seed + 1)
    )
    if one != other:
        raise InvalidOption(
            f"in plain PyTorch the same weights and batch have the loss {one:.7g} after one seed and {other:.7g} after "
            "another: forward draws random numbers, in eval mode too, so that no two runs could be compared; let it "
            "draw them in training mode only."
        )


def _numbers(precision: str) -> plain.Numbers:
    policy = POLICIES[precision]
    return plain.Numbers(
        parameter=getattr(torch, policy.parameter),
        autocast=getattr(torch, policy.compute) if policy.autocast else None,
        scaled=policy.scaled,
    )


def _agree(parts: plain.Run, whole: plain.Run, bound: float) -> bool:
    """Check whether a batch in parts has the loss and the gradient of the whole, as means over samples have."""
    losses = abs(parts.losses[0] - whole.losses[0]) <= bound * abs(whole.losses[0])
    same_names = parts.gradients.keys() == whole.gradients.keys()
    if not losses or not same_names:
        return False
    distance = plain.norm_of(parts.gradients[name].double() - each.double() for name, each in whole.gradients.items())
    return bool(distance <= bound * plain.norm_of(whole.gradients.values()))
