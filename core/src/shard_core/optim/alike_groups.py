"""Whether ranks step alike: the learning rates and other numbers that optimizers' groups have on each of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

Numbers = dict[str, list[dict[str, float]]]


def numbers_of(optimizers: Mapping[str, torch.optim.Optimizer]) -> Numbers:
    """List the numbers in the groups of some optimizers.

    Args:
        optimizers: By name.

    Returns:
        For each name, those of each group, by their keys; a learning rate that is a tensor is a number, too.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> numbers_of({"sgd": torch.optim.SGD([weight], lr=0.5)})["sgd"][0]["lr"]
        0.5
    """
    return {name: [_numbers(group) for group in each.param_groups] for name, each in optimizers.items()}


def _numbers(group: Mapping[str, Any]) -> dict[str, float]:
    found = {key: value.item() if _is_scalar(value) else value for key, value in group.items()}
    return {key: float(value) for key, value in found.items() if isinstance(value, int | float)}


def _is_scalar(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def warn_if_different(everyone: Sequence[Numbers]) -> None:
    """Warn if ranks have different numbers, with which they train apart from one another.

    Args:
        everyone: Each rank's.
    """
    for name, groups in everyone[0].items():
        for place, first in enumerate(groups):
            for rank, other in enumerate(everyone):
                own = other[name][place] if place < len(other.get(name, ())) else {}
                key = next((key for key, value in first.items() if repr(own.get(key)) != repr(value)), None)
                if key is not None:
                    log.warning(
                        "optimizer %r, group %d, has %s=%s on rank 0 and %s on rank %d, so that ranks train apart from "
                        "one another; give schedulers the same number on every rank, such as strategy.reduce(loss).",
                        *(name, place, key, first[key], own.get(key), rank),
                    )
                    return
