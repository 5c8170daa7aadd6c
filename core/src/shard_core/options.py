"""A strategy's options: names, types, defaults and one line each, known without importing the strategy."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
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


_CLIPS = "the loop clips, with strategy.clip_gradients_norm or clip_gradients_value"
_ACCUMULATES = "the loop accumulates, with strategy.no_backward_sync"
_PRECISION = "the argument is called precision, such as precision='bf16-mixed'"
#: What people know as keywords of trainers and of engines' configurations, each with what to do instead.
OF_THE_LOOP = {
    **dict.fromkeys(("gradient_clip_val", "gradient_clip_algorithm", "gradient_clipping", "max_grad_norm"), _CLIPS),
    **dict.fromkeys(("accumulate_grad_batches", "gradient_accumulation_steps"), _ACCUMULATES),
    **dict.fromkeys(("amp", "bf16", "fp16"), _PRECISION),
}


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


OPTIONS_VARIABLE = "SHARD_OPTIONS"
"""Holds the options that whoever starts a script gives it, as a JSON object."""

#: Annotations of options that take classes or functions, for which JSON has no values.
_TAKES_OBJECTS = re.compile(r"\btype\b|\bCallable\b")
#: Annotations of options that have words of their own; what a dict in them maps to is another matter.
_TAKES_WORDS = re.compile(r"\bstr\b|\bLiteral\b")
_DICT = re.compile(r"\bMapping\[[^\]]*\]")
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
    text = os.environ.get(OPTIONS_VARIABLE)
    if not text:
        return {}
    try:
        options = json.loads(text, object_pairs_hook=_unlike)
    except (ValueError, RecursionError) as error:
        raise InvalidOption(f"{OPTIONS_VARIABLE} is {text!r:.60}, which is no JSON ({error}); {_EXPECTED}") from None
    if not isinstance(options, dict):
        raise InvalidOption(f"{OPTIONS_VARIABLE} is {text!r:.60}; {_EXPECTED}")
    return options


def _unlike(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, in which every name must stand once."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise InvalidOption(f"{OPTIONS_VARIABLE} gives {name!r} twice in one object; say which it is to be.")
    return dict(pairs)


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
        >>> given = {"layers": "collections:OrderedDict", "policy": ["aten.mm"]}
        >>> import_references({"recompute": given}, {"recompute": "type | Mapping[str, Any]"})
        {'recompute': {'layers': <class 'collections.OrderedDict'>, 'policy': ['aten.mm']}}
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
    words = bool(_TAKES_WORDS.search(_DICT.sub("", annotation)))
    if isinstance(value, Mapping):
        # What stands for layers is what the option takes alone; the rest may be words, such as names of operations.
        return {key: _objects(option, one, words=words or key != "layers") for key, one in value.items()}
    found = _objects(option, value, words=words)
    return set(found) if isinstance(value, list) and annotation.startswith("set[") else found


def _objects(option: str, value: Any, *, words: bool) -> Any:
    if isinstance(value, list):
        return [_object(option, one, words=words) for one in value]
    return _object(option, value, words=words)


def _object(option: str, value: Any, *, words: bool) -> Any:
    if not isinstance(value, str):
        return value
    reference = _REFERENCE.fullmatch(value)
    if reference is None:
        if words:
            return value  # a word of the option's own
        raise InvalidOption(
            f"{option} is {value!r} in {OPTIONS_VARIABLE}; refer to a class or a function as 'package.module:name', or "
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
