"""The options that whoever starts a script gives it: ``SHARD_OPTIONS``, a JSON object."""

from __future__ import annotations

import importlib
import json
import os
import re
from typing import TYPE_CHECKING, Any

from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "SHARD_OPTIONS"

#: Annotations of options that take classes or functions, for which JSON has no values.
_TAKES_OBJECTS = re.compile(r"\btype\b|\bCallable\b")
_REFERENCE = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):([^\W\d]\w*(?:\.[^\W\d]\w*)*)")


def environment_options() -> dict[str, Any]:
    """Read the variable.

    Returns:
        Options by name; none where the variable is not set, or empty.

    Raises:
        InvalidOption: If it holds something else than a JSON object.

    Example:
        >>> os.environ["SHARD_OPTIONS"] = '{"bucket_cap_mb": 10, "static_graph": true}'
        >>> environment_options()
        {'bucket_cap_mb': 10, 'static_graph': True}
        >>> del os.environ["SHARD_OPTIONS"]
        >>> environment_options()
        {}
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return {}
    try:
        options = json.loads(text)
    except ValueError as error:
        raise InvalidOption(f"{VARIABLE} is {text!r:.60}, which is no JSON ({error}); {_EXPECTED}") from None
    if not isinstance(options, dict):
        raise InvalidOption(f"{VARIABLE} is {text!r:.60}; {_EXPECTED}")
    return options


_EXPECTED = """it must be an object of options by name, such as {"bucket_cap_mb": 10}."""


def import_references(options: Mapping[str, Any], annotations: Mapping[str, str]) -> dict[str, Any]:
    """Import what texts refer to, for options that take classes or functions, and make sets where these are asked for.

    Args:
        options: Values from outside the script.
        annotations: The type of each option, as it was written.

    Returns:
        The options, with objects in place of texts such as ``"package.module:Class"``.

    Raises:
        InvalidOption: If a text refers to nothing, or cannot be imported.

    Example:
        >>> import_references({"policy": ["collections:OrderedDict"]}, {"policy": "set[type] | None"})
        {'policy': {<class 'collections.OrderedDict'>}}
        >>> import_references({"policy": "OrderedDict"}, {"policy": "set[type] | None"})
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: policy is 'OrderedDict' in SHARD_OPTIONS; refer to a class or a function as \
'package.module:name', or '__main__:name' if it is the script's own.
    """
    return {name: _imported(name, value, annotations.get(name, "")) for name, value in options.items()}


def _imported(option: str, value: Any, annotation: str) -> Any:
    if not _TAKES_OBJECTS.search(annotation):
        return value
    if isinstance(value, list):
        each = [_object(option, one, annotation) for one in value]
        return set(each) if annotation.startswith("set[") else each
    return _object(option, value, annotation)


def _object(option: str, value: Any, annotation: str) -> Any:
    if not isinstance(value, str):
        return value
    reference = _REFERENCE.fullmatch(value)
    if reference is None:
        if re.search(r"\bstr\b|\bLiteral\b", annotation):
            return value  # a word of the option's own
        raise InvalidOption(
            f"{option} is {value!r} in {VARIABLE}; refer to a class or a function as 'package.module:name', or "
            "'__main__:name' if it is the script's own."
        )
    module, path = reference.groups()
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise InvalidOption(
            f"{option} refers to {value!r}, but {module!r} cannot be imported ({type(error).__name__}: {error})."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise InvalidOption(f"{option} refers to {value!r}, but there is no such name in {module!r}.")
        found = getattr(found, part)
    return found
