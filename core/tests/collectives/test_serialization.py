"""Values come out of messages as they went in, and what is no message is refused."""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shard_core.collectives.messages import pack, pack_object, unpack, unpack_object
from shard_core.collectives.serialization import Unserializable, deserialize, serialize
from shard_core.errors import CollectiveError

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]


def same(one: Any, other: Any) -> bool:
    """Compare types, signs of zeros, NaNs, dtypes and bits, which == does not."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape, one.requires_grad) == (other.dtype, other.shape, other.requires_grad) and (
            bits(one) == bits(other)
        )
    if isinstance(one, np.ndarray | np.generic):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    return bool(one == other)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = [byte % 2 for byte in raw] if dtype is torch.bool else list(raw)
    return tensor.transpose(0, -1) if shape else tensor


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    dtype = np.dtype(draw(st.sampled_from(["?", "<i1", ">i2", "<u8", "<f2", ">f4", "<f8", "<c8", "<c16"])))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return np.array(draw(st.integers(0, 100))).astype(dtype) + np.zeros(shape, dtype=dtype)


scalars = st.sampled_from([*DTYPES, np.float32(1.5), np.int64(-3), np.bool_(True), 2**2000])
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary()
leaves = plain | scalars | tensors() | arrays()
keys = st.text(st.sampled_from("$a")) | st.integers() | st.booleans() | st.none() | st.binary() | st.tuples(st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner) | st.dictionaries(keys, inner)
    ),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(value=values)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(deserialize(serialize(value)), value)
    assert same(unpack(memoryview(pack(value))), value)
    assert pack_object(value) == pack(value)  # nothing of it is pickled


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(value=values, data=st.data())
def test_damaged_messages_are_refused_or_mean_another_value(value: Any, data: st.DataObject) -> None:
    message = bytearray(serialize(value))
    for _ in range(data.draw(st.integers(1, 3))):
        message[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(message)))
    for damaged in (bytes(message), bytes(message[:cut]), bytes(message) + b"x"):
        with contextlib.suppress(CollectiveError):  # and nothing else
            deserialize(damaged)


def message(outline: object, kinds: object = (), contents: bytes = b"") -> bytes:
    text = json.dumps([outline, kinds]).encode()
    return struct.pack("<Q", len(text)) + text + contents


@pytest.mark.parametrize(
    "forged",
    [
        b"",
        struct.pack("<Q", 2**63) + b"[]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        message({"$content": 0}),
        message({"$content": -1}, [["bytes", 0]]),
        message({"$content": 0}, [["bytes", 5]], b"four"),
        message({"$content": 0}, [["bytes", -1], ["bytes", 1]]),
        message({"$content": 0}, [["bytes", 1]], b"two"),
        message({"$content": 0}, [["array", "|O", 1]], b"8 bytes."),
        message({"$content": 0}, [["array", "<f8", 2, True]], b"8 bytes." * 2),
        message({"$content": 0}, [["array", "<f3", 1]], b"3by"),
        message({"$content": 0}, [["tensor", "torch.nn", 1, False, False]], b"1"),
        message({"$content": 0}, [["tensor", "torch.float32", 2**40, 2**40, False, False]]),
        message({"$content": 0}, [["tensor", "torch.float32", 0, 2**62, 2**62, False, False]]),
        message({"$content": 0}, [["tensor", "torch.qint8", 1, False, False]], b"1"),
        message({"$content": 0}, [["tensor", "torch.int32", 1, True, False]], b"four"),
        message({"$content": 0}, [["object", 1]], b"1"),
        message({"$pickle": "gASVDQAAAAAAAACMCXN1YnByb2Nlc3OULg=="}),
        message({"$dict": [[[1], 2]]}),
        message({"$dict": 3}),
        message({"$tuple": []} | {"$dict": []}),
        message({"$dtype": "torch.os"}),
        message(json.loads("[" * 200 + "]" * 200)),
    ],
)
def test_forged_messages_are_refused(forged: bytes) -> None:
    with pytest.raises(CollectiveError, match="a message is none that ranks send"):
        deserialize(forged)


class Level(enum.IntEnum):
    HIGH = 3


class Word(enum.StrEnum):
    YES = "yes"


class Point(NamedTuple):
    x: int


class Sized(dict[str, int]):
    pass


OBJECTS = [
    Level.HIGH,
    Word.YES,
    Point(1),
    Sized(a=1),
    {1, 2},
    collections.OrderedDict(a=1),
    collections.Counter("aab"),
    torch.nn.Parameter(torch.ones(2)),
    np.array(["text"]),
    np.str_("text"),
    [1, Point(2)],
    torch.Size([2, 3]),
    1 + 2j,
]


@pytest.mark.parametrize("value", OBJECTS, ids=lambda value: type(value).__name__)
def test_a_users_object_comes_back_as_what_it_was(value: Any) -> None:
    received = unpack_object(memoryview(pack_object(value)))
    assert type(received) is type(value)
    assert repr(received) == repr(value)


@pytest.mark.parametrize("value", [value for value in OBJECTS if not isinstance(value, int | str)], ids=repr)
def test_what_shard_itself_sends_is_never_pickled(value: Any) -> None:
    with pytest.raises(Unserializable, match="cannot be sent between ranks; messages consist of None, booleans"):
        serialize(value)
    with pytest.raises(CollectiveError, match="cannot be sent between ranks"):
        unpack(memoryview(pack(value)))
    assert b"pickle" not in pack(value)


def test_numbers_and_strings_of_other_classes_are_sent_as_what_they_extend() -> None:
    assert same(deserialize(serialize([Level.HIGH, Word.YES, np.str_("text")])), [3, "yes", "text"])


def test_what_neither_pickle_takes_is_named() -> None:
    with pytest.raises(CollectiveError, match="an object of type function cannot be sent to other ranks"):
        unpack_object(memoryview(pack_object(lambda: None)))


def test_what_contains_itself_or_is_deep_is_no_value() -> None:
    round_and_round: list[Any] = []
    round_and_round.append(round_and_round)
    with pytest.raises(Unserializable, match="more than 100 levels deep"):
        serialize(round_and_round)
    received = unpack_object(memoryview(pack_object(round_and_round)))
    assert received[0] is received
    deep: Any = 1
    for _ in range(100):
        deep = (deep,)
    assert deserialize(serialize(deep)) == deep
    with pytest.raises(Unserializable, match="more than 100 levels deep"):
        serialize((deep,))


def test_one_tensor_in_two_places_is_sent_once() -> None:
    tensor = torch.zeros(1000)
    sent = serialize({"a": tensor, "b": [tensor]})
    assert len(sent) < 5000
    received = deserialize(sent)
    assert received["a"] is received["b"][0]


def test_tensors_come_to_the_device_if_they_were_on_one() -> None:
    sent = serialize([torch.ones(2), torch.ones(2)])
    moved = sent.replace(b'"torch.float32",2,false,false', b'"torch.float32",2,false,true', 1)
    sizes = struct.pack("<Q", struct.unpack_from("<Q", sent)[0] - 1)
    received = deserialize(sizes + moved[8:], torch.device("meta"))
    assert [each.device.type for each in received] == ["meta", "cpu"]


def test_what_is_received_may_be_written_to() -> None:
    tensor, array = deserialize(serialize((torch.ones(2), np.ones(2))))
    tensor += 1
    array += 1
    assert (tensor.tolist(), array.tolist()) == ([2.0, 2.0], [2.0, 2.0])


def test_a_single_element_may_have_any_stride() -> None:
    value = torch.arange(8.0).view(2, 4)[:1, 1::2][:, :1].t()
    assert value.is_contiguous()
    assert deserialize(serialize(value)).tolist() == [[1.0]]
