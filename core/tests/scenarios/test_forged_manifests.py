"""Manifests and indexes with the right digests and the wrong content: refused in a sentence, nothing touched."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
import xxhash
from fixtures.bits import assert_same_bits
from fixtures.opened_files import opened_files
from fixtures.single_rank import load
from fixtures.small_checkpoint import Trained, forge, judged, loaded, refusal, seal, write
from torch import nn

from shard_core.checkpoint.inspection.compare import compare
from shard_core.checkpoint.inspection.inspect import inspect
from shard_core.checkpoint.inspection.verify import verify
from shard_core.errors import ShardError

_OF_EVERY_TYPE = [
    None, True, 0, -1, 2, 1.5, 1e308, {"$scalar": ["F64", 1e308]}, 2**62, 2**63, 10**30, "", "weight", "x" * 100_000,
    "../model-00000-of-00001.safetensors", {"$dict": [[[], 1]]},
    [], [1], [[]], ["weight", "weight"], {}, {"a": 1}, {"a": {}}, {"$tensor": "state.t"}, {"$tensor": 3},
    {"$float": "nan"}, {"$tuple": [1, "a"]}, {"$dict": [[1, 2]]}, {"$dict": [[{"$tuple": []}, 2]]},
    {"$scalar": ["F32", 3.0]}, {"$scalar": ["F32", "3"]}, {"$scalar": ["F32", [1, 2]]}, {"$scalar": ["I8", 1000]},
    {"$scalar": ["F32", None]}, {"$counter": [["a", []]]}, {"$pickle": "gASVBg=="},
]  # fmt: skip

#: Where anything may stand that is well-formed: what people may want to know, and what users have put there.
_FREE = (("created",), ("attempt",), ("form",), ("world_size",), ("information",), ("values",))


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "run" / "step-1"
    write(path)
    return path


def _places(content: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """List where anything stands in a manifest."""
    inside = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in inside:
        yield (*at, key)
        yield from _places(value, (*at, key))


def _mutants(content: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], Any, dict[str, Any]]]:
    """Replace everything by every type, remove everything, and rename everything."""
    for at in _places(content):
        for value in [*_OF_EVERY_TYPE, "taken away", "renamed"]:
            mutant = copy.deepcopy(content)
            holder = mutant
            for key in at[:-1]:
                holder = holder[key]
            if value == "taken away":
                del holder[at[-1]]
            elif value == "renamed" and isinstance(holder, dict):
                holder["renamed"] = holder.pop(at[-1])
            else:
                holder[at[-1]] = value
            yield at, value, mutant


def _kind(value: Any) -> Any:
    """Return whether a place holds a number, a name or a tensor."""
    if isinstance(value, dict):
        return {key: _kind(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_kind(item) for item in value]
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape) if value.dim() else "number"
    return "number" if isinstance(value, bool | int | float) else type(value).__name__


def _states(target: Trained) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pair the tensors; state that was not saved is not here after a load."""
    return target.tensors(), Trained(0).tensors()


def _fuzz(checkpoint, stride: int) -> None:
    content = json.loads((checkpoint / "manifest.json").read_text())
    del content["digest"]
    with opened_files() as opened:
        for number, (at, value, mutant) in enumerate(_mutants(content)):
            if number % stride:
                continue
            forge(checkpoint, lambda whole, mutant=mutant: (whole.clear(), whole.update(mutant)))
            judged(checkpoint)
            for look in (inspect, lambda path: compare(path, path)):
                with contextlib.suppress(ShardError):
                    look(checkpoint)
            try:
                target, _ = loaded(checkpoint)
            except ShardError as error:
                length = len(str(error))
            except Exception as error:
                raise AssertionError((at, str(value)[:80])) from error
            else:
                length = 0
                if any(at[: len(free)] == free for free in _FREE) or value is None:
                    continue
                # Other hyper-parameters may be accepted, if they are of the kind they were. None is of all kinds.
                for found, wanted in [*zip(target.rest(), Trained(0).rest(), strict=True), _states(target)]:
                    there = {key: value for key, value in wanted.items() if key in found}
                    assert {key: _kind(found[key]) for key in there} == _kind(there), (at, str(value)[:80])
            assert length < 3000, (at, str(value)[:80])
    outside = {path for path in opened if not path.startswith(str(checkpoint.parent))}
    assert not outside


@pytest.mark.slow
def test_nothing_of_the_wrong_type_passes(checkpoint):
    _fuzz(checkpoint, stride=43)


@pytest.mark.long
def test_nothing_of_any_wrong_type_passes_anywhere(checkpoint):
    _fuzz(checkpoint, stride=1)


@pytest.mark.parametrize("number", [1e308, -1e308, 10**30, {"$scalar": ["F64", 1e308]}])
@pytest.mark.parametrize("slot", ["step", "lr"])
def test_numbers_that_a_tensor_of_the_optimizer_cannot_hold_are_refused_before_anything_is_filled(
    checkpoint, slot, number
):
    def change(content):
        record = content["optimizers"]["optimizer"]
        for holder in record["groups"] if slot == "lr" else record["scalars"].values():
            holder[slot] = number

    forge(checkpoint, change)
    with contextlib.suppress(ShardError):  # what is refused has changed nothing: loaded() sees to it
        loaded(checkpoint)
    target = Trained(7)
    target.optimizer.param_groups[0]["lr"] = torch.tensor(0.5)
    tensors = target.tensors() | {"lr": target.optimizer.param_groups[0]["lr"].clone()}
    if (slot, number) == ("step", {"$scalar": ["F64", 1e308]}):
        load(checkpoint, target.module, target.optimizer)  # the optimizer gets the tensor itself
        return
    with pytest.raises(ShardError):
        load(checkpoint, target.module, target.optimizer)
    assert_same_bits(target.tensors() | {"lr": target.optimizer.param_groups[0]["lr"]}, tensors)


def _text(checkpoint, before: str, after: str) -> None:
    """Change the text of a manifest, which need not stay JSON that anyone would write."""
    body = (checkpoint / "manifest.json").read_text().rpartition(', "digest"')[0]
    assert before in body
    seal(checkpoint, body.replace(before, after, 1).encode())


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ('"step": 1', '"step": 1, "step": 2', "'step' twice"),
        ('"world_size": 1', '"world_size": 1, "world_size": 2', "'world_size' twice"),
        ('"step": 1', '"step": NaN', "NaN"),
        ('"step": 1', '"step": -Infinity', "-Infinity"),
        ('"step": 1', '"step": ' + "9" * 5000, "no JSON that can be read"),
        ('"step": 1', '"step": ' + "[" * 100_000 + "]" * 100_000, "no JSON that can be read"),
        ('"step": 1', '"step": ' + '{"a":' * 100_000 + "1" + "}" * 100_000, "no JSON that can be read"),
        ('"step": 1', '"step": ' + "[" * 900 + "]" * 900, "nested more than"),
        ('"step": 1', '"step": ' + '{"$tuple":[' * 400 + "]}" * 400, "nested more than"),
        ('"world_size": 1', '"world_size": ' + "[" * 900 + "]" * 900, "nested more than"),
    ],
    ids=lambda value: value[:30],
)
def test_json_that_no_save_writes_is_refused(checkpoint, before, after, sentence):
    _text(checkpoint, before, after)
    refused = refusal(checkpoint)
    assert sentence in str(refused)
    verdict = judged(checkpoint)
    assert verdict is not None
    assert not verdict.is_fine


def _forge_index(checkpoint, change) -> None:
    """Change the columns of the index, and have the manifest call for just that."""
    path = checkpoint / "index.safetensors"
    columns = {name: column.copy() for name, column in safetensors.numpy.load_file(path).items()}
    raw = change(columns)
    raw = raw if isinstance(raw, bytes) else safetensors.numpy.save(columns)
    path.write_bytes(raw)
    record = {"path": path.name, "bytes": len(raw), "digest": xxhash.xxh3_64_hexdigest(raw)}
    forge(checkpoint, lambda content: content.update(index=record))


def _swap_tilings(columns) -> None:
    columns["cut"] = 1 - columns["cut"]


def _set(name: str, place: int | slice, value: int):
    def change(columns):
        columns[name][place] = value

    return change


def _rows(*rows: int):
    def change(columns):
        columns["rows"][1 : 1 + len(rows)] = rows

    return change


def _column(name: str, kind: str):
    def change(columns):
        columns[name] = columns[name].astype(kind)

    return change


def _two_dims(columns) -> None:
    columns["begin"] = columns["begin"].reshape(1, -1)


def _shortened(name: str):
    def change(columns):
        columns[name] = columns[name][:-1]

    return change


def _no_begin(columns) -> None:
    del columns["begin"]


def _empty(columns) -> None:
    for name in columns:
        columns[name] = columns[name][:0]


def _one_for_two(columns) -> None:
    """Set both moments of the weight to the first one's bytes, digest and all."""
    for name in ("begin", "digests"):
        columns[name][5] = columns[name][4]


def _header(text: bytes):
    return lambda columns: len(text).to_bytes(8, "little") + text


_WILD = [-(2**63), -1, 2**31, 2**62, 2**63 - 1]
_FORGED_INDEXES = {
    **{f"{name} of {value}": _set(name, 1, value) for name in ("rows", "begin", "offsets", "sizes") for value in _WILD},
    "file of -1": _set("file", 0, -1),
    "file of 99": _set("file", 0, 99),
    "rows that wrap": _rows(2**63 - 1, -(2**63)),
    "rows whose boxes wrap": _rows(2**62, 2**62 + 1),
    "rows that fall": _rows(5, 2),
    **{f"cut of {value}": _set("cut", 0, value) for value in (-1, 2, 2**31 - 1)},
    "a cut of another shape": _swap_tilings,
    "a cut of nobody": _set("cut", slice(None), 0),
    "overlap in a file": _set("begin", 1, 152),
    "the same bytes for two tensors": _one_for_two,
    "begin inside an element": _set("begin", 0, 1),
    "a column of another type": _column("begin", "i4"),
    "a column of floats": _column("sizes", "f8"),
    "a column too many": lambda columns: columns.update(more=np.zeros(1)),
    "a column too few": _no_begin,
    "a column of two dims": _two_dims,
    "a column cut short": _shortened("digests"),
    "extents cut short": _shortened("sizes"),
    "no chunks": _empty,
    "a column of a type numpy lacks": _header(b'{"rows":{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}}'),
    "a length beyond the file": _header(b'{"rows":{"dtype":"I64","shape":[1000000000],"data_offsets":[0,8000000000]}}'),
    "a shape that overflows": _header(b'{"rows":{"dtype":"I64","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
    "a pickle": lambda columns: b"\x80\x04" + b"." * 20,
    "nothing": lambda columns: b"\0" * 8,
    "a header of 2**60 bytes": lambda columns: (2**60).to_bytes(8, "little"),
}


@pytest.mark.parametrize("change", _FORGED_INDEXES.values(), ids=_FORGED_INDEXES.keys())
def test_forged_indexes_are_refused(checkpoint, change):
    _forge_index(checkpoint, change)
    assert refusal(checkpoint) is not None
    verdict = judged(checkpoint)
    assert verdict is not None
    assert not verdict.is_fine


def test_a_load_is_refused_for_what_it_reads_and_verify_judges_the_rest(checkpoint):
    _forge_index(checkpoint, _set("begin", 4, 1))  # of the optimizer
    assert "points outside a file, or between two elements" in str(refusal(checkpoint))
    module = nn.Linear(3, 2)
    load(checkpoint, module)
    assert_same_bits(module.state_dict(), dict(Trained(0).module.state_dict()))
    for judge in (verify, inspect):
        assert "points outside a file, or between two elements" in str(judge(checkpoint))
    with pytest.raises(ShardError, match="points outside a file"):
        compare(checkpoint, checkpoint)


def _claim_wide_files(content) -> None:
    """Claim so many bytes that 64 bits cannot count them."""
    content["files"][0]["bytes"] = content["files"][1]["bytes"] = 2**63 - 1
    content["tensors"]["model.weight"] = ["F32", 2**40, 2**21]


def _claim_many_tensors(content) -> None:
    content["tensors"] |= {f"model.{number}": ["F32", 0] for number in range(20_000)}


def _claim_empty_giants(content) -> None:
    content["tensors"] |= {f"model.{number}": ["F32", 0, *[2**62] * 60] for number in range(10)}


@pytest.mark.parametrize("change", [_claim_wide_files, _claim_many_tensors, _claim_empty_giants])
def test_what_is_only_claimed_costs_nothing(checkpoint, change):
    forge(checkpoint, change)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert refusal(checkpoint) is not None
    verdict = judged(checkpoint)
    assert verdict is not None
    assert not verdict.is_fine
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_holes_instead_of_bytes_are_noticed(checkpoint):
    """A file can be long on a disk that holds none of it."""
    for name in ("manifest.json", "index.safetensors"):
        raw = (checkpoint / name).read_bytes()
        os.truncate(checkpoint / name, 1 << 40)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if name.startswith("index"):
            forge(checkpoint, lambda content: content["index"].update(bytes=1 << 40))
        assert refusal(checkpoint) is not None
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20
        (checkpoint / name).write_bytes(raw)
