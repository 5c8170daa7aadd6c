"""The precisions of random programs: which dtype where, by the contract's table, and how plain PyTorch keeps it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from shard_core import plugins
from shard_core.precision.dtypes import dtype_named
from shard_core.precision.interface import PrecisionPolicy
from shard_core.testing.programs.model import Model
from shard_core.testing.programs.settings import splits_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.testing.programs.program import ModelSpec

_FIRST_FACTOR = 65536.0
"""What torch's gradient scaler begins with."""
_ROWS = ("parameter", "compute", "reduce", "accumulate", "optimizer", "buffer")
_CONTRACT: dict[str, tuple[str, ...]] = {
    "32-true": ("float32",) * 6,
    "64-true": ("float64",) * 6,
    "bf16-true": ("bfloat16",) * 6,
    "bf16-mixed": ("float32", "bfloat16", *("float32",) * 4),
    "16-mixed": ("float32", "float16", *("float32",) * 4),
}
"""The contract's table, written down once more: what is judged is not asked what it should be."""


def contract(precision: str) -> PrecisionPolicy:
    """Return which dtype is where in a precision, under strategies without a table of their own."""
    mixed = precision.endswith("-mixed")
    rows = dict(zip(_ROWS, _CONTRACT[precision], strict=True))
    return PrecisionPolicy(name=precision, autocast=mixed, scaled=precision == "16-mixed", **rows)


def table_of(strategy: str, precision: str) -> PrecisionPolicy:
    """Return which dtype is where: as the contract says, or the strategy's card, where that has a table of its own.

    Example:
        >>> table_of("ddp", "bf16-mixed").compute
        'bfloat16'
    """
    own = plugins.find(strategy).policies
    return own[precision] if precision in own else contract(precision)


def rounding(strategy: str, precision: str, *, compiled: bool = False) -> float:
    """Return what the bounds of float32 grow by; in float64 rounding shrinks by 2e-9, and a defect stays.

    Under autocast both sides round the same products to 16 bits alike, and all that adds up does so in float32: the
    bounds stay. Where ranks share layers, each rounds its part of a product; compiled, the gradients of a block that is
    called twice add up in 16 bits. A number of bfloat16 has eight bits: the bound of a norm is two and a half units of
    its last place.
    """
    table = table_of(strategy, precision)
    coarse = table.compute if compiled or splits_layers(plugins.find(strategy)) else table.reduce
    return {"float64": 1e-7, "float32": 1.0, "float16": 200.0, "bfloat16": 2e3}[coarse]


def input_dtype(precision: str) -> torch.dtype:
    """Return what a program's batches are in: a true precision's own dtype, under autocast float32."""
    table = contract(precision)
    return dtype_named(table.parameter if table.autocast else table.compute)


def _cast(tensors: Sequence[torch.Tensor], dtype: str) -> None:
    """Cast tensors of real numbers in place: ``Module.to`` would make complex ones real."""
    for each in tensors:
        if each.is_floating_point():
            each.data = each.data.to(dtype_named(dtype))


class PlainPrecision:
    """Keeps a table of dtypes in plain PyTorch: casts, autocast, copies that optimizers step, and a loss's factor.

    Where optimizers step another dtype than parameters have, models are kept in the optimizers', and each is computed
    with through a copy of it.

    Args:
        strategy: Whose table.
        precision: Its name.
        models: What the program's models are made from.
    """

    def __init__(self, strategy: str, precision: str, models: Sequence[ModelSpec]) -> None:
        self._table = table = table_of(strategy, precision)
        self._rounding = rounding(strategy, precision)
        self._copies = table.optimizer != table.parameter
        self._factor = _FIRST_FACTOR if table.scaled else 1.0
        self._overflowed = False
        with torch.random.fork_rng(devices=()):
            made = [Model(*spec.parts, output=spec.output) for spec in models] if self._copies else []
        self._working = [model.to(dtype_named(table.parameter)) for model in made]

    def convert(self, model: Model) -> None:
        """Cast a model's parameters and buffers; what is frozen is never stepped, and has no other dtype."""
        _cast([*model.parameters(), *model.buffers()], self._table.parameter)
        _cast([each for each in model.parameters() if each.requires_grad], self._table.optimizer)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor in the dtype that the module itself has it in."""
        return tensor.to(dtype_named(self._table.parameter) if tensor.is_floating_point() else tensor.dtype, copy=True)

    def working(self, number: int, model: Model) -> Model:
        """Return what to compute a model's forward with: itself, or a copy that has its values, buffers and flags."""
        if not self._copies:
            return model
        copy = self._working[number]
        for mine, kept in zip(copy.parameters(), model.parameters(), strict=True):
            mine.data.copy_(kept.data)
            mine.requires_grad_(kept.requires_grad)
        for part, own in zip(copy.modules(), model.modules(), strict=True):
            part.training = own.training
            part._buffers = own._buffers
        return copy

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context of a forward."""
        return torch.autocast("cpu", dtype_named(self._table.compute), enabled=self._table.autocast)

    @property
    def jitter(self) -> float:
        """Return how far rounding moves a value, relative to it."""
        return 2e-7 if self._rounding <= 1 else 2e-6 * self._rounding

    @property
    def factor(self) -> float | None:
        """Return what the last loss was multiplied by; None where none ever is."""
        return self._factor if self._table.scaled else None

    def next_factor(self) -> float:
        """Return what the next loss is multiplied by: after a step that was skipped, half of what it was."""
        return self._factor / 2 if self._overflowed else self._factor

    def saved(self) -> tuple[float, bool]:
        """Return the factor, and whether a step since the last backward has found it too large."""
        return self._factor, self._overflowed

    def restore(self, saved: tuple[float, bool]) -> None:
        """Go on with what was saved."""
        self._factor, self._overflowed = saved

    def fits(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Check that a step may be made: without a factor always, with one if no gradient overflowed."""
        return not self._table.scaled or all(bool(each.isfinite().all()) for each in gradients)

    def record(self, stepped: bool) -> None:
        """Note whether a step was made."""
        self._overflowed |= not stepped

    def backward(
        self, models: Sequence[Model], loss: torch.Tensor, ranks: int, gradient: torch.Tensor | None = None, **more: Any
    ) -> None:
        """Run one rank's backward, and add to the models' gradients its share of their mean over ranks.

        Args:
            models: What hold the gradients.
            loss: The rank's, or an output.
            ranks: How many there are.
            gradient: The output's.
            more: Torch's keywords.
        """
        factor = self._factor = self.next_factor()
        self._overflowed = False
        held = [parameter for model in models for parameter in model.parameters()]
        working = self._working if self._copies else models
        computed = [parameter for model in working for parameter in model.parameters()]
        before = [parameter.grad for parameter in held]
        for parameter in held:
            parameter.grad = None
        if gradient is None:
            (loss * factor).backward(**more)
        else:
            loss.backward(gradient * factor, **more)
        dtypes = dtype_named(self._table.reduce), dtype_named(self._table.accumulate)
        for parameter, mine, sum_ in zip(held, computed, before, strict=True):
            if mine.grad is None:
                parameter.grad = sum_
                continue
            travels, adds_up = (mine.dtype, mine.dtype) if mine.is_complex() else dtypes
            share = (mine.grad.to(travels) / (factor * ranks)).to(adds_up)
            mine.grad = None
            parameter.grad = share if sum_ is None else sum_ + share
