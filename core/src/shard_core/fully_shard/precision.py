"""What travels and computes in which dtype: torch's mixed precision of shards, and core's table of it."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.fsdp import MixedPrecision as WrapperPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy

from shard_core.errors import InvalidOption
from shard_core.precision.dtypes import dtype_named
from shard_core.precision.mixed import MixedPrecision
from shard_core.precision.true import TruePrecision

if TYPE_CHECKING:
    from shard_core.precision.interface import Precision, PrecisionPolicy

_UNSAID: Final = "32-true"
"""The precision a run has if nobody says anything, which mixed_precision may replace."""


class CastByEngine(MixedPrecision):
    """Leaves to the engine to cast parameters and inputs; scales the loss in float16.

    Args:
        policy: The table of dtypes.
    """

    @property
    def plain_forward(self) -> bool:
        """Return True: the engine casts at the borders of its units."""
        return True

    def forward_context(self, device_type: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context that does nothing."""
        del device_type
        return contextlib.nullcontext()


def check_mixed_precision(given: Any) -> None:
    """Refuse what torch's mixed precision of shards cannot be.

    Args:
        given: The option ``mixed_precision``.

    Raises:
        InvalidOption: If it has the wrong type, or asks for what ``fully_shard`` does not do.
    """
    if given is None:
        return
    if not isinstance(given, MixedPrecisionPolicy | WrapperPrecision):
        raise InvalidOption(
            f"mixed_precision is {given!r}; give torch's MixedPrecision or MixedPrecisionPolicy, or leave it out and "
            "say precision='bf16-mixed'."
        )
    for field in _DTYPES:
        dtype = getattr(given, field, None)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InvalidOption(
                f"mixed_precision has {field}={dtype!r}; give a floating dtype such as torch.bfloat16, or None."
            )
    if isinstance(given, MixedPrecisionPolicy):
        return
    for field, reason in _WITHOUT_COUNTERPART.items():
        if getattr(given, field) != getattr(WrapperPrecision(), field):
            raise InvalidOption(f"mixed_precision has {field}={getattr(given, field)!r}; {reason}.")
    if given.cast_forward_inputs and not given.cast_root_forward_inputs:
        raise InvalidOption(
            "mixed_precision has cast_forward_inputs=True and cast_root_forward_inputs=False; inputs are cast in "
            "every unit or in none: give both or neither."
        )


_DTYPES: Final = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
_WITHOUT_COUNTERPART: Final = {
    "keep_low_precision_grads": "gradients have the dtype of the parameters that are stepped: leave it out",
    "_module_classes_to_ignore": "a unit has one dtype: leave it out, or say precision='bf16-mixed', which "
    "chooses op by op",
}


def wire_policy(given: Any, row: PrecisionPolicy) -> MixedPrecisionPolicy:
    """Convert the dtypes in which parameters and gradients travel to what ``fully_shard`` takes.

    Args:
        given: The option ``mixed_precision``, checked; None follows the table.
        row: The table of dtypes that holds.

    Returns:
        The policy.
    """
    if isinstance(given, MixedPrecisionPolicy):
        return given
    if given is not None:
        return MixedPrecisionPolicy(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype,
            cast_forward_inputs=given.cast_root_forward_inputs,
        )
    # Under autocast whole parameters stay in the dtype they are stored in, and ops cast as their lists say.
    computes = row.parameter if row.autocast else row.compute
    return MixedPrecisionPolicy(
        param_dtype=dtype_named(computes) if computes != row.parameter else None,
        reduce_dtype=dtype_named(row.reduce) if row.reduce != computes else None,
    )


def precision_of(given: Any, named: Precision) -> Precision:
    """Choose the part that says which dtype where.

    Args:
        given: The option ``mixed_precision``, checked.
        named: What the argument ``precision`` stands for.

    Returns:
        The part named, unless ``mixed_precision`` alone says anything, or the engine has to cast.

    Raises:
        InvalidOption: If both are given and contradict each other.
    """
    row = named.policy
    stated = _stated(given)
    if row.name == _UNSAID and stated:
        fields: dict[str, Any] = {"name": "mixed_precision", "scaled": stated.get("compute") == "float16", **stated}
        return CastByEngine(dataclasses.replace(row, **fields))
    for field, dtype in stated.items():
        if getattr(row, field) != dtype:
            raise InvalidOption(
                f"mixed_precision says that {_FIELDS[field]} {dtype}, and precision {row.name!r} that they are "
                f"{getattr(row, field)}; leave one of them out, or let them agree."
            )
    if isinstance(named, TruePrecision) and row.compute != row.parameter:
        return CastByEngine(row)
    return named


_FIELDS: Final = {"compute": "products are", "reduce": "gradients travel in", "buffer": "buffers are"}


def _stated(given: Any) -> dict[str, str]:
    """List the fields of the table that torch's object decides."""
    if given is None:
        return {}
    dtypes = {
        "compute": given.param_dtype,
        "reduce": given.reduce_dtype or given.param_dtype,
        "buffer": getattr(given, "buffer_dtype", None),
    }
    return {field: _name(dtype) for field, dtype in dtypes.items() if dtype is not None}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
