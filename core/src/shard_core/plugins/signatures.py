"""Checking whether a function of the user's takes what it will be called with, before it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from shard_core.errors import InvalidOption


def check_signature(what: str, function: Callable[..., Any], called: str, *args: Any, **kwargs: Any) -> None:
    """Refuse a function that takes other arguments.

    Args:
        what: What the function was given for, for the message.
        function: The user's; what is written in C and does not declare its arguments passes.
        called: How it will be called, as source text.
        args: What it will be called with; only how many counts.
        kwargs: By which names; the values do not count.

    Raises:
        InvalidOption: If a call with these arguments would fail before it began.

    Example:
        >>> def square(output):
        ...     return output**2
        >>> check_signature("loss", square, "loss(output, batch)", None, None)
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: loss is called as loss(output, batch), but square(output) does not fit: \
too many positional arguments.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # what is written in C need not declare them
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        kind = getattr(function, "__name__", type(function).__name__)
        raise InvalidOption(f"{what} is called as {called}, but {kind}{signature} does not fit: {error}.") from None
