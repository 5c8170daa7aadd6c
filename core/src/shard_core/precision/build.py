"""From a precision's name or policy to the part that applies it."""

from __future__ import annotations

from typing import Any

from shard_core.precision.interface import Precision, PrecisionPolicy
from shard_core.precision.mixed import MixedPrecision
from shard_core.precision.policies import POLICIES, resolve_name
from shard_core.precision.true import TruePrecision


def build_precision(precision: Any) -> Precision:
    """Build the part for a precision's name or policy; a part is returned as it is.

    Args:
        precision: A name such as ``"bf16-mixed"``, a ``PrecisionPolicy`` or a ``Precision``.

    Returns:
        The part, fresh unless one was given.

    Example:
        >>> build_precision("bf16").policy.compute
        'bfloat16'
    """
    if isinstance(precision, Precision):
        return precision
    policy = precision if isinstance(precision, PrecisionPolicy) else POLICIES[resolve_name(precision)]
    return MixedPrecision(policy) if policy.autocast else TruePrecision(policy)
