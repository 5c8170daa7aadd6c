"""Reads and writes what a random program consists of as JSON, and refuses what is none of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from shard_core.errors import InvalidOption, nearest
from shard_core.testing.programs.operations import Attempt
from shard_core.testing.programs.vocabulary import KINDS, WAYS

if TYPE_CHECKING:
    from shard_core.testing.programs.operations import Operation


def operation_from(record: Any) -> Operation:
    """Build an operation from what ``record_of`` wrote.

    Args:
        record: The name under ``"operation"``, and its fields.

    Raises:
        InvalidOption: If it is no such record.

    Example:
        >>> operation_from({"operation": "Step", "optimizer": 0})
        Step(optimizer=0, by_hand=False)
    """
    if not isinstance(record, dict) or record.get("operation") not in KINDS:
        name = record.get("operation") if isinstance(record, dict) else record
        raise InvalidOption(
            f"{name!r} is no operation{nearest(str(name), KINDS) or ';'} there are: {', '.join(KINDS)}."
        )
    kind = KINDS[record["operation"]]
    fields = {name: value for name, value in record.items() if name != "operation"}
    if kind is Attempt:
        return Attempt(refused=operation_from(fields.get("refused")))
    operation: Operation = checked(kind, fields)
    how = getattr(operation, "how", "")
    if kind in WAYS and how not in WAYS[kind]:
        raise InvalidOption(
            f"{kind.__name__} has no how={how!r}{nearest(how, WAYS[kind]) or ';'} there are: {', '.join(WAYS[kind])}."
        )
    return operation


def record_of(operation: Operation) -> dict[str, Any]:
    """Return what JSON keeps of an operation."""
    inner = {"refused": record_of(operation.refused)} if isinstance(operation, Attempt) else {}
    return {"operation": type(operation).__name__, **dataclasses.asdict(operation), **inner}


def checked(kind: type[Any], fields: dict[str, Any]) -> Any:
    """Build a dataclass from a record, whose names and types must be those of its fields.

    Args:
        kind: The dataclass, of numbers, words, truths and tuples of numbers or words.
        fields: As JSON has them.

    Raises:
        InvalidOption: If a name or a type is another.
    """
    if not isinstance(fields, dict):
        raise InvalidOption(f"{kind.__name__} is written as a JSON object, not {fields!r}.")
    declared = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    for name, value in fields.items():
        if name not in declared or not _fits(value, declared[name]):
            raise InvalidOption(f"{kind.__name__} has no field {name!r} that takes {value!r}; it has {declared}.")
    try:
        return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})
    except TypeError as error:
        raise InvalidOption(f"{kind.__name__} is written with the fields {', '.join(declared)}: {error}.") from error


def _fits(value: Any, declared: str) -> bool:
    if declared.startswith("tuple"):
        inner = declared.removeprefix("tuple[").split(",")[0]
        return isinstance(value, list | tuple) and all(_fits(each, inner) for each in value)
    if value is None:
        return "None" in declared
    kinds: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
    kind = kinds.get(declared.split(" ", maxsplit=1)[0], ())
    return isinstance(value, kind) and (declared.startswith("bool") or not isinstance(value, bool))
