from __future__ import annotations

import dataclasses
import types
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch

from shard_core.data import move

META = torch.device("meta")
Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass(frozen=True)
class _Sample:
    image: torch.Tensor
    label: str
    size: int = dataclasses.field(init=False, default=3)


class _Encoding(UserDict):
    """Moves itself in place, as ``transformers.BatchEncoding`` does."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


class _Shouting(list):
    pass


class _Named(list):
    """A list whose constructor takes something else first."""

    def __init__(self, name, entries=()):
        super().__init__(entries)
        self.name = name


class _Output(OrderedDict):
    """Lets its values be set by key alone, as the outputs of transformers do."""

    def update(self, *args, **kwargs):
        raise TypeError("not this way")


def _tensor():
    return torch.ones(2)


@pytest.mark.parametrize(
    ("batch", "tensors"),
    [
        (_tensor(), lambda b: [b]),
        ([_tensor(), 1, "a"], lambda b: [b[0]]),
        ((_tensor(), [_tensor()]), lambda b: [b[0], b[1][0]]),
        (_Shouting([_tensor()]), lambda b: [b[0]]),
        (Pair(_tensor(), {"deep": (_tensor(),)}), lambda b: [b.left, b.right["deep"][0]]),
        ({"a": _tensor(), "b": None}, lambda b: [b["a"]]),
        (OrderedDict(a=_tensor()), lambda b: [b["a"]]),
        (defaultdict(list, a=_tensor()), lambda b: [b["a"]]),
        (UserDict(a=_tensor()), lambda b: [b["a"]]),
        (Counter(a=_tensor()), lambda b: [b["a"]]),
        (_Output([("a", _tensor())]), lambda b: [b["a"]]),
        (_Named("images", [_tensor()]), lambda b: [b[0]]),
        (_Encoding(a=_tensor()), lambda b: [b["a"]]),
        (_Sample(_tensor(), "cat"), lambda b: [b.image]),
        (torch.nn.utils.rnn.pack_sequence([_tensor()]), lambda b: [b.data]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_move_and_the_structure_stays(batch, tensors):
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert [tensor.device for tensor in tensors(moved)] == [META] * len(tensors(moved))


def test_containers_of_other_classes_keep_what_they_hold():
    counts = Counter(the=3, cat=1)
    words = _Named("words", ["the", "cat"])
    moved = move({"counts": counts, "words": words}, META)
    assert moved["counts"] == counts == Counter(the=3, cat=1)
    assert (moved["words"].name, list(moved["words"])) == ("words", ["the", "cat"])


def test_the_batch_given_is_not_changed():
    batch = {"a": [_tensor()], "b": _Sample(_tensor(), "cat"), "c": defaultdict(list, d=_tensor())}
    moved = move(batch, META)
    assert {t.device.type for t in (batch["a"][0], batch["b"].image, batch["c"]["d"])} == {"cpu"}
    assert moved["b"].label == "cat"
    assert moved["c"].default_factory is list


def test_a_mapping_that_cannot_be_written_becomes_a_dict():
    assert move(types.MappingProxyType({"a": _tensor()}), META)["a"].device == META


@pytest.mark.parametrize("value", [None, 3, "text", b"bytes", {1, 2}, torch.Tensor, torch.float32])
def test_everything_else_is_passed_on(value):
    assert move(value, META) is value


def test_tensors_that_are_there_are_not_copied():
    tensor = _tensor()
    assert move([tensor], torch.device("cpu"))[0] is tensor


class _Copies:
    """Stands in for a CUDA device, which torch for CPUs alone has not: what was copied to it, and how."""

    def __init__(self, monkeypatch):
        self.pinned, self.made = set(), []
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: id(tensor) in self.pinned)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: self.pin(tensor))
        monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **kwargs: self.to(tensor, *args, **kwargs))

    def pin(self, tensor):
        copy = tensor.clone()
        self.made.append(copy)  # holds it, so that its number is not given away
        self.pinned.add(id(copy))
        return copy

    def to(self, tensor, device, *, non_blocking=False):
        self.last = tensor, torch.device(device), non_blocking
        return tensor


CUDA = torch.device("cuda", 1)


@pytest.fixture
def copies(monkeypatch):
    return _Copies(monkeypatch)


def test_copies_to_cuda_devices_are_of_pinned_memory_and_do_not_block(copies):
    batch = _tensor()
    assert torch.equal(move({"a": [batch]}, CUDA)["a"][0], batch)
    source, device, non_blocking = copies.last
    assert id(source) in copies.pinned
    assert (device, non_blocking) == (CUDA, True)


def test_what_a_loader_has_pinned_is_not_copied_again(copies):
    pinned = copies.pin(_tensor())
    move(pinned, CUDA)
    assert copies.last == (pinned, CUDA, True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.ones(0),
        torch.nn.Parameter(torch.ones(2), requires_grad=False),
    ],
    ids=["sparse", "with gradients", "empty", "of a class"],
)
def test_what_cannot_be_pinned_as_it_is_is_copied_from_where_it_is(copies, tensor):
    move(tensor, CUDA)
    assert copies.last[0] is tensor


def test_copies_to_other_devices_block(copies):
    tensor = _tensor()
    move(tensor, META)
    assert copies.last == (tensor, META, False)
    move(torch.empty(2, device="meta"), CUDA)
    assert not copies.pinned
    assert copies.last[2] is False


class _Batch:
    """Moves itself, as a ``transformers.BatchEncoding`` does."""

    def to(self, device, *, non_blocking=False):
        return device, non_blocking


class _Plain:
    def to(self, device):
        return device, None


@pytest.mark.parametrize(
    ("batch", "device", "non_blocking"), [(_Batch(), CUDA, True), (_Batch(), META, False), (_Plain(), CUDA, None)]
)
def test_what_moves_itself_does_not_block_if_it_can(batch, device, non_blocking):
    assert move(batch, device) == (device, non_blocking)
