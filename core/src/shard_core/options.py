"""A strategy's options: names, types, defaults and one line each, known without importing the strategy."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from shard_core.errors import BrokenBackend, InvalidOption, nearest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One keyword argument as ``shard show`` prints it.

    Attributes:
        name: The keyword.
        type: Its annotation, as source text.
        default: Its default value, a plain Python value.
        help: One line for people.
    """

    name: str
    type: str
    default: Any
    help: str


def option(default: Any, help: str) -> Any:
    """Declare a field of a configuration dataclass with the line people read about it.

    Args:
        default: The value if the user sets none.
        help: One line: what it does.

    Returns:
        A dataclass field.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Config:
        ...     overlap: "bool" = option(True, "send gradients while backward still runs")
        >>> options_of(Config)[0].help
        'send gradients while backward still runs'
    """
    return dataclasses.field(default=default, metadata={"help": help})


def options_of(config: type) -> tuple[Option, ...]:
    """List the fields of a configuration dataclass as options.

    Args:
        config: A dataclass whose fields were declared with ``option``, in a module with
            ``from __future__ import annotations`` (types are shown as they were written).

    Returns:
        The options in the order of declaration.

    Raises:
        BrokenBackend: If it is no dataclass, or a field was declared otherwise.
    """
    owner = f"{config.__module__}.{config.__qualname__}"
    if not dataclasses.is_dataclass(config):
        raise BrokenBackend(
            f"{owner} is no dataclass; decorate it with @dataclasses.dataclass(frozen=True, kw_only=True)."
        )
    for field in dataclasses.fields(config):
        if "help" not in field.metadata:
            raise BrokenBackend(
                f"{owner} declares {field.name!r} without the line people read about it; write "
                f"{field.name}: {field.type} = option(DEFAULT, HELP)."
            )
    return tuple(
        Option(name=f.name, type=str(f.type), default=f.default, help=f.metadata["help"])
        for f in dataclasses.fields(config)
    )


def check_names(
    owner: str, given: Mapping[str, Any], allowed: Iterable[str], refused: Mapping[str, str] | None = None
) -> None:
    """Refuse keywords that do not exist.

    Args:
        owner: Who was given the keywords, for the message.
        given: The keywords.
        allowed: The keywords there are.
        refused: Keywords that people know from elsewhere, each with what to do instead.

    Raises:
        InvalidOption: If any keyword is unknown; with what to do instead, or the nearest and all there are.

    Example:
        >>> check_names("strategy 'fsdp'", {"unit_sise": 1}, ["unit_size"])
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: strategy 'fsdp' has no option 'unit_sise'; did you mean \
'unit_size'? Its options are: unit_size.
    """
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            if refused and name in refused:
                raise InvalidOption(f"{owner} takes no {name!r}: {refused[name]}.")
            hint = nearest(name, allowed) or "."
            listed = f"Its options are: {', '.join(allowed)}." if allowed else "It takes none."
            raise InvalidOption(f"{owner} has no option {name!r}{hint} {listed}")
