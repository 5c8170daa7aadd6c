"""Checks of the arguments of a save or a load, made before anything is done."""

from __future__ import annotations

from collections.abc import Mapping

from shard_core.errors import InvalidOption


def check_flag(name: str, value: object, *, or_none: bool = False) -> None:
    """Check that an argument is True or False: a word such as ``"no"`` would count as True.

    Args:
        name: The argument.
        value: What was given for it.
        or_none: Whether None is allowed too.

    Raises:
        InvalidOption: If it is anything else.
    """
    if isinstance(value, bool) or (or_none and value is None):
        return
    allowed = "True, False or None" if or_none else "True or False"
    raise InvalidOption(f"{name} is {_described(value)}; give {allowed}.")


def check_filter(filter: object) -> None:
    """Check that a filter can be called.

    Raises:
        InvalidOption: If it cannot.
    """
    if filter is not None and not callable(filter):
        raise InvalidOption(
            f"filter is {_described(filter)}; give a function that returns for a tensor's key, such as "
            "'model.head.weight', whether it is saved."
        )


def check_storage_options(options: object) -> None:
    """Check that options of a store have names.

    Raises:
        InvalidOption: If they have none.
    """
    if options is not None and not isinstance(options, Mapping):
        raise InvalidOption(f"storage_options is {_described(options)}; give a dict, as fsspec takes it.")


def check_names(names: object) -> None:
    """Check that names can be looked up.

    Raises:
        InvalidOption: If they cannot.
    """
    if names is not None and not isinstance(names, Mapping) and not callable(names):
        raise InvalidOption(
            f"names is {_described(names)}; give a dict or a function from the names in the files to the module's."
        )


def check_key(key: object) -> None:
    """Check that a key is text.

    Raises:
        InvalidOption: If it is not.
    """
    if key is not None and not isinstance(key, str):
        raise InvalidOption(f"key is {_described(key)}; give the key of a state dict in the file, such as 'model'.")


def check_adapter(adapter: object) -> None:
    """Check that the name of adapters is text.

    Raises:
        InvalidOption: If it is not.
    """
    if adapter is not None and not isinstance(adapter, str):
        raise InvalidOption(f"adapter is {_described(adapter)}; give the name of adapters, such as 'default'.")


def _described(value: object) -> str:
    return f"{value!r}, of type {type(value).__name__}"
