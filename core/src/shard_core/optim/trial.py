"""An optimizer of the user's class and settings over tensors of ours: it disturbs nothing, and has bounded work."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from shard_core._versions import TorchDispatchMode

#: Elements that operations may touch, by group of parameters; one takes about a nanosecond, and AdamW needs 1e8.
_WORK = 2_000_000_000
#: The elements in whose time an operation starts.
_START = 20_000
#: The most elements of a tensor: 16 times as many as the largest that is stepped, so that no matrix has sides of
#: thousands.
_LARGEST = 320_000

#: Parts of the names of operations whose work grows with the cube of a matrix's side.
_CUBIC = ("linalg", "mm", "cholesky", "qr", "svd", "triangular")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class NoAnswer(Exception):
    """A trial that came to no end; its message is a clause to go on "because" with."""


class Bounds(TorchDispatchMode):
    """Breaks trials off that call a collective, which no other rank would answer, or work too much.

    The clock is not asked: machines must judge alike, whatever else they do.

    Args:
        groups: How many groups of parameters each trial has.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = _WORK * groups
        self._broken: NoAnswer | None = None

    @contextmanager
    def around(self, what_fails: str) -> Iterator[None]:
        """Check what a stranger's optimizer does inside against the bounds.

        Args:
            what_fails: A clause for what it raises.

        Raises:
            NoAnswer: If it raises anything, or leaves the bounds.
        """
        try:
            with self:
                yield
        except NoAnswer:
            raise
        except Exception as error:
            raise self._broken or NoAnswer(f"{what_fails} ({named(error)})") from error
        if self._broken:
            raise self._broken

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace in _COLLECTIVES:
            self._break("it calls collectives of its own")
        cubic = any(part in func.__name__ for part in _CUBIC) and "norm" not in func.__name__
        self._charge(_START + _work((args, kwargs), cubic))
        result = func(*args, **(kwargs or {}))
        self._charge(_work(result, cubic))
        return result

    def _charge(self, work: int) -> None:
        self._left -= work
        if self._left < 0:
            self._break("trying it out takes more work than an optimizer that works element by element needs")

    def _break(self, reason: str) -> None:
        # Kept as well as raised: the optimizer may catch what is raised inside it.
        self._broken = self._broken or NoAnswer(reason)
        raise self._broken


def _work(value: Any, cubic: bool) -> int:
    """Estimate the work on the tensors in arguments or results."""
    if isinstance(value, torch.Tensor):
        elements = value.numel()
        if elements > _LARGEST:
            return _WORK * elements
        return elements * min(value.shape[-2:]) if cubic and value.dim() > 1 else elements
    if isinstance(value, (tuple, list)):
        return sum([_work(each, cubic) for each in value])
    return _work(list(value.values()), cubic) if isinstance(value, dict) else 0


class Trial:
    """One optimizer over tensors of ours.

    Args:
        kind: The user's class.
        defaults: What the user's optimizer had for defaults.
        groups: Settings of its groups, as many as there shall be.
        starts: By group, the values its tensors start with.
        kept: What the user's keeps as attributes of its own.
        seed: Of what it may draw while it steps.
    """

    def __init__(
        self,
        kind: Callable[..., torch.optim.Optimizer],
        defaults: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        starts: Sequence[Sequence[torch.Tensor]],
        *,
        kept: Mapping[str, Any],
        seed: int,
    ) -> None:
        self.parameters = [[torch.nn.Parameter(start.clone()) for start in each] for each in starts]
        self._seed = seed
        accepted = inspect.signature(kind).parameters
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
        arguments = {name: value for name, value in defaults.items() if takes_all or name in accepted}
        self.optimizer = kind(
            [
                {**copy.deepcopy(dict(group)), "params": list(parameters)}
                for group, parameters in zip(groups, self.parameters, strict=True)
            ],
            **copy.deepcopy(arguments),
        )
        self._keep(kept)
        # Some average weights, and step only after their train() was called.
        train = getattr(self.optimizer, "train", None)
        if callable(train):
            train()

    def _keep(self, kept: Mapping[str, Any]) -> None:
        """Copy what the constructor was given and put into no group: plain values, and nothing that is shared.

        Raises:
            NoAnswer: If something else would be missing.
        """
        for name, value in kept.items():
            if _is_plain(value):
                setattr(self.optimizer, name, copy.deepcopy(value))
            elif getattr(self.optimizer, name, None) is None:
                raise NoAnswer(f"it keeps {name!r}, which one that is built from its groups' settings would not have")

    def step(self, gradients: Sequence[Sequence[torch.Tensor]]) -> None:
        """Step once.

        Args:
            gradients: By group, one for each tensor.
        """
        _seed_all(self._seed)
        step: Callable[..., Any] = self.optimizer.step
        evaluate = functools.partial(self._evaluate, gradients)
        asks = inspect.signature(step).parameters.get("closure")
        evaluate()
        # Given only where it must be: it would undo what a step does to gradients before it asks.
        step(*([evaluate] if asks is not None and asks.default is inspect.Parameter.empty else []))

    def _evaluate(self, gradients: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Set the gradients, as the closure of a loss does."""
        for parameters, of_group in zip(self.parameters, gradients, strict=True):
            for parameter, gradient in zip(parameters, of_group, strict=True):
                parameter.grad = gradient.clone()
        return torch.ones(())


def _is_plain(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, (bool, int, float, str, type(None)))


def named(error: Exception) -> str:
    """Return an exception's class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).split(chr(10), 1)[0].rstrip('.')}"


def _seed_all(seed: int) -> None:
    """Seed generators as ranks have them: not alike. ``torch.manual_seed`` also seeds devices that begin later."""
    torch.default_generator.manual_seed(seed)
    device = torch.get_default_device()
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Restore the state of every generator afterwards, and make new tensors on a device.

    Args:
        device: Where to try optimizers.
    """
    python, numpy = random.getstate(), np.random.get_state()
    # A device's context looks at every call, which makes each several times slower.
    there = contextlib.nullcontext() if device == torch.get_default_device() else device
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), there:
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
