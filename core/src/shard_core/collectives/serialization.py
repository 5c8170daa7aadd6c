"""Values as bytes and back, without pickle: JSON, followed by the contents of tensors, arrays and bytes."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shard_core.errors import CollectiveError

if TYPE_CHECKING:
    from typing_extensions import Buffer

JSON = Any

_LENGTH = struct.Struct("<Q")
#: How deeply values may be nested, so that no reader of JSON, and no recursion over it, comes to its limit.
_MOST_LEVELS = 100
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
#: Those whose elements are whole bytes that torch can copy.
_TENSOR_DTYPE = re.compile(r"torch\.(bool|u?int(8|16|32|64)|bfloat16|float(8_\w+|16|32|64)|complex\d+)")
#: Booleans, integers, floating-point and complex numbers, in either order of bytes.
_ARRAY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
_CARRIED = (
    "None, booleans, numbers, strings, bytes, lists, tuples, dicts, torch dtypes, dense tensors and NumPy arrays of "
    "numbers"
)
#: What reading bytes that mean nothing can end in.
_MEANINGLESS = (struct.error, ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class Unserializable(CollectiveError):
    """A value is none of those that messages between ranks consist of."""


def serialize(value: Any, *, exact: bool = False) -> bytes:
    """Convert a value to bytes.

    Args:
        value: None, booleans, numbers, strings, bytes, torch dtypes, dense tensors, NumPy arrays and scalars of
            numbers, and lists, tuples and dicts of them.
        exact: Whether subclasses of ``int``, ``float`` and ``str`` are refused rather than sent as what they extend.

    Returns:
        What ``deserialize`` takes. Tensors and arrays are sent with their elements in order, whatever their strides.

    Raises:
        Unserializable: Naming the first type that is none of these.
    """
    writer = _Writer(exact)
    try:
        outline = json.dumps([writer.outline(value), writer.kinds], separators=(",", ":")).encode()
    except ValueError as error:  # an integer of thousands of digits
        raise Unserializable(f"a value cannot be sent between ranks: {error}.") from error
    return b"".join([_LENGTH.pack(len(outline)), outline, *writer.contents])


def deserialize(data: Buffer, device: torch.device | None = None) -> Any:
    """Convert bytes to the value they stand for; whatever they are, nothing in them is executed.

    Args:
        data: What ``serialize`` returned, or anything else.
        device: Where tensors go that were on a device; those that were in host memory, and all if None, stay there.

    Returns:
        A copy, which shares no memory with the bytes.

    Raises:
        CollectiveError: If ``serialize`` never returns such bytes.

    Example:
        >>> deserialize(serialize({"lr": (0.1, float("inf")), 3: torch.ones(2)}))
        {'lr': (0.1, inf), 3: tensor([1., 1.])}
    """
    view = memoryview(data)
    try:
        (length,) = _LENGTH.unpack_from(view)
        begin = _LENGTH.size + length
        outline, kinds = json.loads(bytes(view[_LENGTH.size : begin]))
        return _value(outline, _contents(kinds, view[begin:], device), _MOST_LEVELS)
    except _MEANINGLESS as e:
        raise CollectiveError(
            f"a message is none that ranks send ({type(e).__name__}); let all ranks run the same version of Shard, and "
            "let nobody else reach their ports."
        ) from e


class _Writer:
    """Collects what follows the JSON of one value.

    Attributes:
        kinds: What each content is.
        contents: Their bytes.
    """

    def __init__(self, exact: bool) -> None:
        self.kinds: list[JSON] = []
        self.contents: list[Buffer] = []
        self._exact = exact
        self._places: dict[int, int] = {}

    def outline(self, value: Any, levels: int = _MOST_LEVELS) -> JSON:
        """Return a value as JSON, in which whatever JSON has no word for is a dict with one key that begins with $."""
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value  # Python's JSON has words for infinities and integers of any size
        if kind in (list, tuple, dict):
            return self._container(value, levels)
        if kind is torch.dtype:
            return {"$dtype": str(value)}
        if id(value) not in self._places:  # what is there twice arrives as one object
            content = _content(value)
            if content is None:
                return self._extended(value)
            self._places[id(value)] = len(self.kinds)
            self.kinds.append(content[0])
            self.contents.append(content[1])
        return {"$content": self._places[id(value)]}

    def _container(self, value: Any, levels: int) -> JSON:
        if levels == 0:
            raise Unserializable(f"a value nested more than {_MOST_LEVELS} levels deep cannot be sent between ranks.")
        if isinstance(value, list):
            return [self.outline(item, levels - 1) for item in value]
        if isinstance(value, tuple):
            return {"$tuple": [self.outline(item, levels - 1) for item in value]}
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.outline(item, levels - 1) for key, item in value.items()}
        return {"$dict": [[self.outline(each, levels - 1) for each in pair] for pair in value.items()]}

    def _extended(self, value: Any) -> JSON:
        """Return what a number or string of another class extends."""
        for plain in (int, float, str):
            if isinstance(value, plain) and not self._exact:
                return plain.__getnewargs__(value)[0]  # type: ignore[arg-type]  # whatever its class shows of it
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise Unserializable(f"an object of type {kind} cannot be sent between ranks; messages consist of {_CARRIED}.")


def _content(value: Any) -> tuple[JSON, Buffer] | None:
    """Return what a value is, and its bytes; None if it is nothing that consists of bytes."""
    if type(value) is bytes:
        return ["bytes", len(value)], value
    if type(value) is torch.Tensor and _is_dense(value):
        rows = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        flat = rows.as_strided((rows.numel(),), (1,))  # a single element may have any stride
        about = [str(value.dtype), *value.shape, value.requires_grad, value.device.type != "cpu"]
        return ["tensor", *about], flat.view(torch.uint8).numpy().data
    if type(value) is np.ndarray and _ARRAY_DTYPE.fullmatch(value.dtype.str):
        return ["array", value.dtype.str, *value.shape], np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
    if isinstance(value, np.generic) and type(value) is value.dtype.type and _ARRAY_DTYPE.fullmatch(value.dtype.str):
        return ["scalar", value.dtype.str], value.tobytes()
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and bool(_TENSOR_DTYPE.fullmatch(str(tensor.dtype)))


def _contents(kinds: JSON, data: memoryview, device: torch.device | None) -> list[Any]:
    """Read what follows the JSON."""
    found, begin = [], 0
    for kind, *about in kinds:
        read, size = _KINDS[kind](about, device)
        if size > len(data) - begin:
            raise ValueError(size)
        found.append(read(data[begin : begin + size]))
        begin += size
    if begin != len(data):
        raise ValueError(begin)
    return found


_Read = tuple[Callable[[memoryview], Any], int]


def _bytes(about: JSON, device: torch.device | None) -> _Read:
    del device
    (size,) = about
    return bytes, _checked_sizes([size])[0]


def _tensor(about: JSON, device: torch.device | None) -> _Read:
    name, *shape, requires_grad, on_device = about
    dtype, shape = _DTYPES[name], _checked_sizes(shape)
    if not _TENSOR_DTYPE.fullmatch(name):
        raise ValueError(name)

    def read(data: memoryview) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        contents = np.frombuffer(data, dtype=np.uint8)
        # A boolean is a byte that is 0 or 1; any other would make two that are true differ.
        tensor.reshape(-1).view(torch.uint8).numpy()[:] = contents != 0 if dtype is torch.bool else contents
        if on_device is True and device is not None:
            tensor = tensor.to(device)
        return tensor.requires_grad_(requires_grad is True)

    return read, math.prod(shape) * dtype.itemsize


def _array(about: JSON, device: torch.device | None) -> _Read:
    del device
    name, *shape = about
    dtype, shape = _array_dtype(name), _checked_sizes(shape)
    return lambda data: np.frombuffer(data, dtype=dtype).reshape(shape).copy(), math.prod(shape) * dtype.itemsize


def _scalar(about: JSON, device: torch.device | None) -> _Read:
    del device
    (name,) = about
    dtype = _array_dtype(name)
    return lambda data: np.frombuffer(data, dtype=dtype)[0], dtype.itemsize


_KINDS: Mapping[str, Callable[[JSON, torch.device | None], _Read]] = {
    "bytes": _bytes,
    "tensor": _tensor,
    "array": _array,
    "scalar": _scalar,
}


def _array_dtype(name: JSON) -> np.dtype[Any]:
    if not isinstance(name, str) or not _ARRAY_DTYPE.fullmatch(name):
        raise ValueError(name)
    return np.dtype(name)


def _checked_sizes(sizes: list[JSON]) -> list[int]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(sizes)
    return sizes


def _value(outline: JSON, contents: list[Any], levels: int) -> Any:
    """Put contents into their places in the JSON."""
    if not isinstance(outline, list | dict):
        return outline
    if levels == 0:
        raise ValueError(levels)
    if isinstance(outline, list):
        return [_value(item, contents, levels - 1) for item in outline]
    if not any(key.startswith("$") for key in outline):
        return {key: _value(item, contents, levels - 1) for key, item in outline.items()}
    ((tag, marked),) = outline.items()
    if tag == "$content":
        return contents[_checked_sizes([marked])[0]]
    return _MARKED[tag](marked, lambda item: _value(item, contents, levels - 1))


_MARKED: Mapping[str, Callable[[JSON, Callable[[JSON], Any]], Any]] = {
    "$tuple": lambda items, value: tuple(map(value, items)),
    "$dict": lambda pairs, value: {value(key): value(item) for key, item in pairs},
    "$dtype": lambda name, _: _DTYPES[name],
}
