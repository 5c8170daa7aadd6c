"""The user's own values as JSON, nothing lost: tuples, odd keys, infinities; torch is imported for tensors alone."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.dtypes import ITEM_SIZES, dtype_code, torch_dtype
from shard_core.checkpoint.format.json_fields import shown
from shard_core.errors import CheckpointCorrupted, CheckpointError

if TYPE_CHECKING:
    import torch

JSON = Any

#: How deeply values may be nested, so that no reader of JSON, and no recursion over it, comes to its limit.
_MOST_LEVELS = 100
_ADVICE = (
    "a checkpoint holds tensors, numbers, strings, booleans, None, and dicts, lists and tuples of them; give it the "
    "object's state_dict()."
)


def encode(value: Any, path: str, keep: Callable[[str, torch.Tensor], JSON], levels: int = _MOST_LEVELS) -> JSON:
    """Encode a value as JSON.

    Whatever JSON would change is written as a dict with one key that begins with ``$``.

    Args:
        value: Numbers, strings, None, and dicts, lists and tuples of them, with tensors anywhere.
        path: Its name, for messages and for the tensors in it.
        keep: Called with the name of each tensor and the tensor; returns what stands for it.
        levels: How deeply it may be nested.

    Raises:
        CheckpointError: Naming the first thing that is none of these, or is nested too deeply.

    Example:
        >>> encode({"best": float("inf"), 3: (1, 2)}, "scheduler", keep=lambda name, tensor: name)
        {'$dict': [['best', {'$float': 'inf'}], [3, {'$tuple': [1, 2]}]]}
    """
    import torch

    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, torch.Tensor):
        return keep(path, value)
    if type(value) in (list, tuple):
        _check_levels(path, levels)
        items = [encode(item, f"{path}.{place}", keep, levels - 1) for place, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, collections.OrderedDict, collections.Counter):
        _check_levels(path, levels)
        return _encode_dict(value, path, keep, levels - 1)
    raise CheckpointError(f"{path!r} is a {type(value).__module__}.{type(value).__qualname__}: {_ADVICE}")


def _check_levels(path: str, levels: int) -> None:
    if levels == 0:
        raise CheckpointError(f"{path[:80]!r} is nested more than {_MOST_LEVELS} levels deep; give a flatter value.")


def _encode_dict(value: dict[Any, Any], path: str, keep: Callable[[str, torch.Tensor], JSON], levels: int) -> JSON:
    for key in value:
        if not isinstance(key, str | int | float) and key is not None:
            raise CheckpointError(f"{path!r} has a key of type {type(key).__qualname__}; keys are strings and numbers.")
    pairs = [[encode(key, path, keep), encode(item, f"{path}.{key}", keep, levels)] for key, item in value.items()]
    if type(value) is collections.Counter:
        return {"$counter": pairs}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(pairs)
    return {"$dict": pairs}


def encode_scalar(path: str, tensor: torch.Tensor) -> JSON:
    """Encode a tensor of one element as JSON, for ``encode``'s ``keep``.

    Raises:
        CheckpointError: If the tensor has dims.
    """
    if tensor.dim():
        raise CheckpointError(f"{path!r} is a tensor of shape {tuple(tensor.shape)}; only scalars can be kept here.")
    code = dtype_code(tensor.dtype, path)
    return {"$scalar": [code, encode(tensor.item(), path, encode_scalar)]}


def decode(value: JSON, tensor: Callable[[str], Any]) -> Any:
    """Decode what ``encode`` returned.

    Args:
        value: The JSON.
        tensor: Returns the tensor of a name that ``keep`` returned as ``{"$tensor": name}``.

    Raises:
        CheckpointCorrupted: If ``encode`` never returns such a value.

    Example:
        >>> decode({"$dict": [["best", {"$float": "inf"}], [3, {"$tuple": [1, 2]}]]}, tensor=None)
        {'best': inf, 3: (1, 2)}
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tags = [key for key in value if key.startswith("$")]
    if not tags:
        return {key: decode(item, tensor) for key, item in value.items()}
    if len(value) == 1 and tags[0] in _DECODERS:
        try:
            return _DECODERS[tags[0]](value[tags[0]], tensor)
        except CheckpointError:
            raise
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise CheckpointCorrupted(f"the manifest holds a malformed {tags[0]} value.") from error
    raise CheckpointCorrupted(f"the manifest holds a value with the unknown mark {shown(tags[0])}.")


def _pairs(value: JSON, tensor: Callable[[str], Any]) -> dict[Any, Any]:
    return {decode(key, tensor): decode(item, tensor) for key, item in value}


def no_tensor(name: Any) -> Any:
    """Raise for a tensor, for ``decode`` where there can be none."""
    raise CheckpointCorrupted(f"the manifest keeps a tensor {shown(name)} where only scalars can be.")


def _scalar(value: JSON) -> torch.Tensor:
    import torch

    code, number = value
    scalar = decode(number, no_tensor)
    if code not in ITEM_SIZES or not isinstance(scalar, bool | int | float):
        raise ValueError(value)
    return torch.tensor(scalar, dtype=torch_dtype(code))


_DECODERS: Mapping[str, Callable[[JSON, Any], Any]] = {
    "$float": lambda value, _: {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}[value],
    "$tuple": lambda value, tensor: tuple(decode(item, tensor) for item in value),
    "$dict": _pairs,
    "$counter": lambda value, tensor: collections.Counter(_pairs(value, tensor)),
    "$tensor": lambda value, tensor: tensor(value),
    "$scalar": lambda value, _: _scalar(value),
}


def plain(value: Any) -> Any:
    """Return what ``encode`` returned as simple JSON, for people to read.

    Tuples become lists, scalars numbers, infinities strings, odd keys strings; of a tensor stays its key.

    Args:
        value: The encoded value.

    Example:
        >>> plain({"betas": {"$tuple": [0.9, 0.95]}, "step": {"$scalar": ["F32", 3.0]}, "best": {"$float": "inf"}})
        {'betas': [0.9, 0.95], 'step': 3.0, 'best': 'inf'}
        >>> plain({"$dict": [[3, {"$tensor": "state.window"}]]})
        {'3': 'tensor state.window'}
    """
    if isinstance(value, list):
        return [plain(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    tag, content = next(iter(value.items())) if len(value) == 1 else ("", None)
    if tag in ("$float", "$tuple"):
        return plain(content)
    if tag == "$scalar" and isinstance(content, list) and len(content) == 2:
        return plain(content[1])
    if tag in ("$dict", "$counter") and isinstance(content, list):
        pairs = [pair for pair in content if isinstance(pair, list) and len(pair) == 2]
        return {str(plain(key)): plain(item) for key, item in pairs}
    return f"tensor {content}" if tag == "$tensor" else {key: plain(item) for key, item in value.items()}
