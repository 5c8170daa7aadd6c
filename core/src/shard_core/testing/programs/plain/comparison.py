"""Holds what a rank has shown to what plain PyTorch says, within the bounds of rounding."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shard_core.testing.programs.plain.plain_run import Values

#: The largest difference that is rounding, relative to the tensor's largest element, in float32.
BOUNDS = {
    "loss": 1e-5, "later": 1e-5, "output": 1e-5, "outputs": 1e-5, "norm": 1e-5, "gradients": 2e-5,
    "weights": 1e-5, "averaged": 1e-5, "full": 1e-5, "state": 1e-4, "reduced": 1e-6, "rates": 1e-9, "rate": 1e-9,
    "factor": 0.0, "stepped": 0.0, "tracked": 0.0, "failed": 0.0, "left": 0.0, "generator": 0.0, "masks": 0.0,
}  # fmt: skip
_LARGEST = 1e-6
"""Beside zeros, rounding is measured by the largest element of the same kind over all tensors."""
#: What has its dtype from the precision.
_DTYPES = ("weights", "state", "gradients")
#: What a rank shows that is the same on all, or its own; the rest is shown by rank 0 alone.
_BY_EACH_RANK = (
    "loss",
    "later",
    "output",
    "outputs",
    "full",
    "norm",
    "reduced",
    "rates",
    "rate",
    "factor",
    "stepped",
    "tracked",
    "failed",
    "left",
    "generator",
    "masks",
)


_INEXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
_DRAWN = "is in another state than in plain PyTorch: other, more or fewer numbers were drawn from it"


def first_difference(
    shown: Values,
    truth: Values,
    at: int,
    further: Mapping[tuple[int, str], float],
    bounds: Mapping[str, float],
    *,
    whole: bool,
    scaled: bool,
) -> tuple[str, str, float] | None:
    """Return the first value of one rank that differs after one operation: its key, how, and by what factor too far."""
    found, true = flat(shown), flat(truth)
    largest: dict[str, float] = {}
    for key, value in true.items():
        if isinstance(value, torch.Tensor) and value.dtype in _INEXACT and value.numel():
            kind = key.rpartition(".")[2] if key.startswith("state") else kind_of(key)
            largest[kind] = max(largest.get(kind, 0.0), float(value.abs().max()))
    gradients = [value for key, value in true.items() if kind_of(key) == "gradients"]
    overflowed = scaled and not all(bool(each.isfinite().all()) for each in gradients)
    for key, value in true.items():
        kind = kind_of(key)
        if not whole and kind not in _BY_EACH_RANK:
            continue
        if key not in found:
            return key, "is missing", math.inf
        if kind in _DTYPES and value.numel() and found[key].dtype != value.dtype:
            return key, f"is of {found[key].dtype}, in plain PyTorch of {value.dtype}", math.inf
        near = largest.get(key.rpartition(".")[2] if kind == "state" else kind, 0.0)
        bound = bounds[kind] + further.get((at, key), 0.0)
        if overflowed and kind == "gradients":
            continue  # of a loss that was multiplied by too much: they are thrown away, whatever clipping made of them
        if scaled and kind == "norm" and not (math.isfinite(found[key]) or math.isfinite(value)):
            continue  # likewise: whether two infinities met in a sum is the kernel's
        far = distance(found[key], value, near * _LARGEST / max(BOUNDS[kind], 1e-30) if kind != "norm" else 0.0)
        if not far <= bound:
            said = f"is {_short(found[key])}, in plain PyTorch {_short(value)}: off by {far:.1e}, allowed {bound:.1e}"
            return key, _DRAWN if kind == "generator" else said, far / bound if bound else math.inf
    for key in found:
        if key not in true:
            return key, f"is shown, {_short(found[key])}, and plain PyTorch has none", math.inf
        if not whole and kind_of(key) not in _BY_EACH_RANK:
            return key, "is shown, which rank 0 alone should", math.inf
    return None


def distance(mine: Any, truth: Any, least: float = 0.0) -> float:
    """Return the largest difference relative to the largest true element; infinite for another shape or a NaN.

    Args:
        mine: A tensor, a number, or a list of numbers; infinitely far if it is None.
        truth: What it should be.
        least: What it is relative to at least.

    Example:
        >>> distance([1.0, 3.0], [1.0, 2.0])
        0.5
        >>> distance([1.0, 0.0], [1.0, math.nan])
        inf
    """
    if mine is None:
        return math.inf
    true = torch.as_tensor(truth)
    own = torch.as_tensor(mine)
    if own.shape != true.shape:
        return math.inf
    if torch.equal(own, true) or not true.numel():
        return 0.0
    finite, infinite = true.isfinite(), true.isinf()
    same = torch.equal(own.isnan(), true.isnan()) and torch.equal(own[infinite], true[infinite])
    if not same or not bool(own[finite].isfinite().all()):
        return math.inf
    true, own = (torch.view_as_real(each) if each.is_complex() else each for each in (true[finite], own[finite]))
    true, own = true.double(), own.double()
    if not true.numel():
        return 0.0
    return (own - true).abs().max().item() / max(true.abs().max().item(), least, 1e-12)


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by name, those of a dict by its name and theirs.

    Example:
        >>> flat({"norm": 1.0, "gradients": {"weight": 2.0}})
        {'norm': 1.0, 'gradients.weight': 2.0}
    """
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return found


def kind_of(key: str) -> str:
    """Return the kind of a value, by whose bound it is compared: ``"state"`` for ``state.0.weight.exp_avg``."""
    return key.partition(".")[0]


def _short(value: Any) -> str:
    return str(value.flatten()[:4].tolist() if isinstance(value, torch.Tensor) else value)
