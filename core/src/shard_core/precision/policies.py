"""The one table of precisions: which dtype where, by the names people type."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from shard_core.errors import UnsupportedPrecision, nearest
from shard_core.precision.interface import PrecisionPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping


def _true(name: str, dtype: str) -> PrecisionPolicy:
    """Return a row with one dtype for everything."""
    return PrecisionPolicy(
        name=name,
        parameter=dtype,
        compute=dtype,
        reduce=dtype,
        accumulate=dtype,
        optimizer=dtype,
        buffer=dtype,
    )


def _mixed(name: str, compute: str, *, scaled: bool) -> PrecisionPolicy:
    """Return a row with matrix products in 16 bits under autocast, everything that sums or stays in float32."""
    return PrecisionPolicy(
        name=name,
        parameter="float32",
        compute=compute,
        reduce="float32",
        accumulate="float32",
        optimizer="float32",
        buffer="float32",
        autocast=True,
        scaled=scaled,
    )


#: Every precision core knows, by name.
POLICIES: Mapping[str, PrecisionPolicy] = types.MappingProxyType(
    {
        policy.name: policy
        for policy in (
            _true("32-true", "float32"),
            _mixed("bf16-mixed", "bfloat16", scaled=False),
            _mixed("16-mixed", "float16", scaled=True),
            _true("bf16-true", "bfloat16"),
            _true("16-true", "float16"),
            _true("64-true", "float64"),
        )
    }
)

_ALIASES = {"64": "64-true", "32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed"}


def resolve_name(precision: str | int, others: tuple[str, ...] = ()) -> str:
    """Return the name of a precision for what people type.

    The short forms mean what they mean elsewhere: 16 bits are mixed, 32 and 64 are true.

    Args:
        precision: A name, ``64``, ``32``, ``16`` or ``"bf16"``.
        others: Names that are known beside the table's.

    Returns:
        A name in ``POLICIES`` or in ``others``.

    Raises:
        UnsupportedPrecision: If there is no such precision.

    Example:
        >>> resolve_name("bf16"), resolve_name(32)
        ('bf16-mixed', '32-true')
        >>> resolve_name("bf16-mixd")
        Traceback (most recent call last):
        ...
        shard_core.errors.UnsupportedPrecision: there is no precision 'bf16-mixd'; did you mean \
'bf16-mixed'? The precisions are: 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, 64-true, \
and 64, 32, 16 and bf16 for short.
    """
    name = _ALIASES.get(str(precision), str(precision))
    known = (*POLICIES, *others)
    if name not in known:
        hint = (nearest(name, known) if isinstance(precision, str) else "") or "."
        raise UnsupportedPrecision(
            f"there is no precision {precision!r}{hint} The precisions are: {', '.join(known)}, "
            f"and 64, 32, 16 and bf16 for short."
        )
    return name
