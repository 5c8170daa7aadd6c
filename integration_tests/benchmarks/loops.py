"""What comparisons of steps are made of: our loop, the one people write by hand, and a race between two."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLIP = 1.0
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def loss_of(output: Any) -> torch.Tensor:
    """Return the loss of a model that has one, or else the mean square of its output."""
    loss: torch.Tensor = getattr(output, "loss", output)
    return loss if loss.dim() == 0 else loss.square().mean()


class Ours:
    """The loop of the README."""

    def __init__(self, strategy: Any, model: nn.Module, make: MakeOptimizer, *, clip: bool = False) -> None:
        self.strategy, self.clip = strategy, clip
        self.model, (self.optimizer,) = strategy.setup_module_and_optimizers(model, [make(model.parameters())])

    def step(self, *args: Any, denominator: Any = None, **kwargs: Any) -> torch.Tensor:
        """Take a step and return its loss, without waiting for it."""
        loss = loss_of(self.model(*args, **kwargs))
        self.strategy.backward(loss, self.model, denominator=denominator)
        if self.clip:
            self.strategy.clip_gradients_norm(self.model, self.optimizer, CLIP)
        self.strategy.optimizer_step(self.optimizer)
        self.optimizer.zero_grad()
        return loss.detach()


class Raw:
    """The loop by hand, on torch's own words: under a context and with a scaler where a precision needs them."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, *, clip: bool = False) -> None:
        self.model, self.optimizer, self.clips = model, make(model.parameters()), clip
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        self.scaler: torch.amp.GradScaler | None = None

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a step and return its loss, without waiting for it."""
        with self.context():
            loss = loss_of(self.model(*args, **kwargs))
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.clips:
            self.clip()
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP, error_if_nonfinite=True)


def race(raw: Callable[[], float], ours: Callable[[], float], rounds: int) -> dict[str, Any]:
    """Let two loops take turns, each of which returns milliseconds; the ratio of a round is between neighbours."""
    pairs = []
    for number in range(rounds):
        order = (raw, ours) if number % 2 == 0 else (ours, raw)
        times = {loop: loop() for loop in order}
        pairs.append((times[raw], times[ours]))
    theirs, mine = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(own / other for other, own in pairs)
    return {"raw_ms": theirs, "ours_ms": mine, "ratio": statistics.median(ratios), "interval": interval(ratios)}


def interval(ordered: list[float]) -> tuple[float, float]:
    """Return the order statistics between which the median lies with 95 %, or all there is of fewer than six."""
    count, outside, beyond = len(ordered), 0, 0
    while beyond < count // 2:
        outside += 2 * math.comb(count, beyond)
        if outside > 0.05 * 2**count:
            break
        beyond += 1
    place = max(beyond - 1, 0)
    return ordered[place], ordered[-1 - place]
