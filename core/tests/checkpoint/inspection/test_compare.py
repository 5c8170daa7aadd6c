from __future__ import annotations

import math

import pytest
import torch
from fixtures.single_rank import save
from fixtures.thread_ranks import all_ranks
from torch import nn

from shard_core.checkpoint.inspection.compare import compare
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.shard import shards_of_range
from shard_core.checkpoint.state.training_state import TrainingState
from shard_core.errors import InvalidOption


class _Flat(TrainingState):
    """Tensors sharded at odd places over ranks."""

    modules = ("model",)

    def __init__(self, tensors, rank, size):
        self._tensors, self._rank, self._size = tensors, rank, size

    def shards(self):
        found = []
        for name, tensor in self._tensors.items():
            flat = tensor.reshape(-1)
            bounds = [flat.numel() * each // self._size for each in range(self._size + 1)]
            start, stop = bounds[self._rank : self._rank + 2]
            found += shards_of_range(f"model.{name}", tensor.shape, start, flat[start:stop])
        return found

    def aliases(self):
        return {}

    def optimizers(self):
        return {}

    def prepare_load(self, slots):
        raise AssertionError

    def finish_load(self, optimizers):
        raise AssertionError


def _save(path, tensors, size=1, values=None, **options):
    def on_rank(coordinator):
        state = _Flat(tensors, coordinator.rank, size)
        ShardedCheckpointIO().save(path, state, values or {}, coordinator=coordinator, information={}, **options)

    all_ranks(size, on_rank)
    return path


def _problems(comparison):
    return {(each.kind, each.name): each.problem for each in comparison.differences}


def _tensors():
    torch.manual_seed(0)
    return {
        "grid": torch.randn(7, 5, 3),
        "half": torch.randn(33).bfloat16(),
        "tiny": torch.randn(6).to(torch.float8_e4m3fn),
        "mask": torch.rand(9) > 0.5,
        "ids": torch.arange(2**53, 2**53 + 11),
        "phase": torch.randn(5, dtype=torch.complex64),
        "fine": torch.randn(4, dtype=torch.float64),
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 4),
        "odd": torch.tensor([math.nan, math.inf, -math.inf, 0.0]),
    }


def test_form_and_number_of_ranks_make_no_difference(tmp_path):
    tensors = _tensors()
    paths = [_save(tmp_path / str(size), tensors, size) for size in (1, 2, 3)]
    paths.append(_save(tmp_path / "full", tensors, 3, state_dict_type="full"))
    for path in paths[1:]:
        comparison = compare(paths[0], path)
        assert comparison.same
        assert (comparison.tensors, comparison.bytes) == (len(tensors), sum(t.nbytes for t in tensors.values()))
        assert compare(path, paths[0]).same


@pytest.mark.parametrize("name", [name for name in _tensors() if name != "none"])
def test_one_changed_bit_is_found_in_every_dtype(tmp_path, name):
    tensors = _tensors()
    first = _save(tmp_path / "a", tensors, 2)
    tensors[name] = tensors[name].clone()
    bits = tensors[name].reshape(-1)[-1:].view(torch.uint8)
    bits ^= torch.tensor([1] + [0] * (bits.numel() - 1), dtype=torch.uint8)
    (difference,) = compare(first, _save(tmp_path / "b", tensors, 3)).differences
    assert (difference.kind, difference.name, difference.elements.differing) == ("elements", f"model.{name}", 1)
    assert difference.elements.elements == tensors[name].numel()


def test_figures_are_those_of_the_elements(tmp_path):
    first = _save(tmp_path / "a", {"w": torch.tensor([1.0, -8.0, 0.5, 0.0])}, 2)
    second = _save(tmp_path / "b", {"w": torch.tensor([1.0, -8.0, 2.5, -0.0])}, 1)
    comparison = compare(first, second)
    assert _problems(comparison) == {("elements", "model.w"): "2 of 4 elements differ, by at most 2 (relative 0.25)"}
    assert compare(first, second, tolerance=0.25).same
    assert not compare(first, second, tolerance=0.24).same
    third = _save(tmp_path / "c", {"w": torch.tensor([1.0, math.nan, 0.5, 0.0])})
    (difference,) = compare(first, third, tolerance=1e9).differences
    assert difference.elements.absolute == math.inf
    with pytest.raises(InvalidOption, match="tolerance is nan"):
        compare(first, second, tolerance=math.nan)


def test_large_tensors_are_compared_in_pieces(tmp_path):
    tensor = torch.zeros(3, 1_300_007)
    first = _save(tmp_path / "a", {"w": tensor}, 2)
    tensor[[0, 1, 2], [0, 650_000, 1_300_006]] = 2.0
    second = _save(tmp_path / "b", {"w": tensor}, 3)
    (difference,) = compare(first, second).differences
    assert (difference.elements.differing, difference.elements.absolute) == (3, 2.0)


def test_what_is_missing_or_shaped_or_typed_otherwise_is_named(tmp_path):
    first = _save(tmp_path / "a", {"a": torch.ones(2), "b": torch.ones(2, 3), "c": torch.ones(2), "e": torch.ones(2)})
    second = _save(
        tmp_path / "b",
        {"b": torch.ones(3, 2), "c": torch.ones(2).bfloat16(), "d": torch.ones(1), "e": torch.full((2,), 3).half()},
    )
    assert _problems(compare(first, second)) == {
        ("missing", "model.a"): "not in the second",
        ("missing", "model.d"): "not in the first",
        ("shape", "model.b"): "shape (2, 3) against (3, 2)",
        ("dtype", "model.c"): "dtype F32 against BF16; the numbers are the same",
        ("dtype", "model.e"): "dtype F32 against F16; 2 of 2 elements differ, by at most 2 (relative 0.667)",
    }


def test_values_are_compared_by_path(tmp_path):
    tensors = {"w": torch.ones(1)}
    mine = {"step": 3, "best": math.inf, "seen": [1, 2, 3], "deep": {"x": {"y": True}}, "mean": torch.ones(2)}
    first = _save(tmp_path / "a", tensors, values={**mine, "only": None})
    other = {**mine, "step": 4, "best": 1.0, "seen": [1, 5, 6], "deep": {"x": {"y": 1}}, "mean": torch.zeros(2)}
    assert _problems(compare(first, _save(tmp_path / "b", tensors, values=other))) == {
        ("elements", "state.mean"): "2 of 2 elements differ, by at most 1 (relative 1)",
        ("value", "best"): "'inf' against 1.0",
        ("value", "deep.x.y"): "True against 1",
        ("value", "only"): "only in the first",
        ("value", "seen"): "2 of 3 items differ, the first at 1: 2 against 5",
        ("value", "step"): "3 against 4",
    }
    near = _save(tmp_path / "c", tensors, values={**mine, "only": None, "step": 3.0000001})
    assert not compare(first, near).same
    assert compare(first, near, tolerance=1e-6).same


def _trained(lr=0.1, more=(), **settings):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    groups = [{"params": list(module[0].parameters())}, {"params": list(module[1].parameters()), "lr": lr}]
    optimizer = torch.optim.AdamW(groups, **settings)
    for _ in range(1 + len(more)):
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return module, optimizer


def test_optimizers_are_compared_by_parameter(tmp_path):
    module, optimizer = _trained()
    save(tmp_path / "a", module, optimizer)
    save(tmp_path / "same", *_trained(foreach=True))  # how it computes is nobody's difference
    assert compare(tmp_path / "a", tmp_path / "same").same

    module, optimizer = _trained(lr=0.2, weight_decay=0.5)
    for state in optimizer.state.values():
        state["step"] += 4
    save(tmp_path / "b", module, optimizer)
    problems = [
        f"{each.name}: {each.problem}"
        for each in compare(tmp_path / "a", tmp_path / "b").differences
        if each.kind == "optimizer"
    ]
    assert problems == [
        "optimizer group 0.weight_decay: 0.01 against 0.5",
        "optimizer group 1.lr: 0.1 against 0.2",
        "optimizer group 1.weight_decay: 0.01 against 0.5",
        "optimizer step: 1.0 against 5.0, of '0.bias', '0.weight', '1.bias', '1.weight'",
    ]

    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    save(tmp_path / "c", module, optimizer)
    problems = [f"{each.name}: {each.problem}" for each in compare(tmp_path / "b", tmp_path / "c").differences]
    assert problems == [
        "optimizer group 0: other parameters: '1.bias' only in the second",
        "optimizer group 1: other parameters: '1.bias' only in the first",
    ]
    save(tmp_path / "d", module)
    problems = _problems(compare(tmp_path / "c", tmp_path / "d"))
    assert problems["optimizer", "optimizer"] == "not in the second"
    assert problems["missing", "optim.0.weight.exp_avg"] == "not in the second"


class _Tied(nn.Module):
    def __init__(self, tied, swapped=False):
        super().__init__()
        torch.manual_seed(0)
        first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        with torch.no_grad():
            second.weight.copy_(first.weight)
        if tied:
            second.weight = first.weight
        for name in ("b", "a") if swapped else ("a", "b"):
            setattr(self, name, first if name == "a" else second)


def test_which_of_its_tied_names_a_tensor_is_stored_under_makes_no_difference(tmp_path):
    modules = {"a": _Tied(True), "b": _Tied(True, swapped=True), "c": _Tied(False)}
    for name, module in modules.items():
        save(tmp_path / name, module, torch.optim.Adagrad(module.parameters()))
    assert compare(tmp_path / "a", tmp_path / "b").same
    problems = _problems(compare(tmp_path / "a", tmp_path / "c"))
    assert problems["tied", "model.a.weight"] == "tied to 'model.b.weight' only in the first"
    assert not any(kind == "elements" for kind, _ in problems)


def test_damaged_tensors_are_named(tmp_path):
    tensors = {"a": torch.ones(4), "b": torch.ones(4)}
    first, second = _save(tmp_path / "a", tensors), _save(tmp_path / "b", tensors)
    path = second / "model-00000-of-00001.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    (difference,) = compare(first, second).differences
    assert (difference.kind, difference.name) == ("damaged", "model.b")
