"""Names, shapes and dtypes of others' files held against a module: all that differs at once, and nothing touched."""

from __future__ import annotations

import pytest
import torch
from fixtures import foreign_weights
from fixtures.flat_state import FlatState
from fixtures.single_rank import state_of
from fixtures.thread_ranks import all_ranks, on_ranks
from torch import nn

from shard_core.checkpoint.interop.load_weights import load_weights
from shard_core.errors import CheckpointError, CheckpointMismatch, InvalidOption


class _Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.table = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("angles", torch.arange(3.0), persistent=False)


def _copies(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def test_all_differences_are_listed_at_once_and_nothing_is_touched(tmp_path):
    there = {
        "0.weight": torch.ones(3, 2),
        "0.bias": torch.ones(3, dtype=torch.bfloat16),
        "1.bias": torch.ones(3),
        "1.count": torch.ones((), dtype=torch.int64),
        "2.weights": torch.ones(2, 2),
        "2.bias": "none",
    }
    here = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 3), nn.Linear(2, 2))
    here[0].bias = nn.Parameter(torch.zeros(3))
    here[1].register_buffer("count", torch.zeros(()))
    before = _copies(here)
    path = foreign_weights.write_torch(tmp_path / "weights.pt", there)
    with pytest.raises(CheckpointMismatch) as raised:
        foreign_weights.load(path, here, names={"3.weight": None})
    message = str(raised.value)
    for difference in (
        "differ in 8 ways; nothing was changed",
        "'0.weight' has shape (4, 2) here, (3, 2) in the files",
        "'0.bias' has dtype float32 here, bfloat16 in the files; cast=True converts it",
        "'1.weight' is not in the files; did you mean '0.weight'?",
        "'1.count' has dtype float32 here, int64 in the files\n",
        "'2.weight' is not in the files; did you mean '2.weights'?",
        "'2.weights' is in the files, but not here; did you mean '2.weight'?",
        "'2.bias' is a str in the files, not a tensor of numbers",
        "names has '3.weight', which is not in the files",
    ):
        assert difference in f"{message}\n", difference
    torch.testing.assert_close(here.state_dict(), before, rtol=0, atol=0)


def test_what_fits_is_loaded_when_asked_and_the_rest_is_told(tmp_path):
    there, here = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    path = foreign_weights.write_folder(tmp_path / "folder", there.state_dict())
    head = _copies(here[1])
    left = foreign_weights.load(path, here, strict=False)
    assert sorted(left) == [
        "'1.bias' has shape (4,) here, (1,) in the files",
        "'1.weight' has shape (4, 3) here, (1, 3) in the files",
    ]
    assert torch.equal(here[0].weight, there[0].weight)
    torch.testing.assert_close(here[1].state_dict(), head, rtol=0, atol=0)


def test_names_are_translated_by_a_dict_or_a_function(tmp_path):
    there, here = nn.Linear(2, 2), nn.ModuleDict({"layer": nn.Linear(2, 2)})
    tensors = {**{f"encoder.{name}": tensor for name, tensor in there.state_dict().items()}, "step": torch.tensor(3)}
    path = foreign_weights.write_file(tmp_path / "weights", tensors)
    table = {"encoder.weight": "layer.weight", "encoder.bias": "layer.bias", "step": None}
    for names in (table, table.get, lambda name: None if name == "step" else name.replace("encoder", "layer")):
        nn.init.zeros_(here["layer"].weight)
        assert foreign_weights.load(path, here, names=names) == ()
        assert torch.equal(here["layer"].weight, there.weight)
    with pytest.raises(CheckpointMismatch, match=r"'step' \(here 'layer.step'\) is in the files, but not here"):
        foreign_weights.load(path, here, names={**table, "step": "layer.step"})
    with pytest.raises(CheckpointMismatch, match=r"'encoder.bias' is in the files, but not here"):
        foreign_weights.load(path, here, names={name: table[name] for name in ("encoder.weight", "step")})
    with pytest.raises(InvalidOption, match=r"names gives 3 for 'encoder\.\w+'; it must give a string, or None"):
        foreign_weights.load(path, here, names=lambda name: 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn])
def test_floats_are_cast_only_when_asked(tmp_path, dtype):
    there, here = nn.Linear(3, 2).to(dtype), nn.Linear(3, 2)
    path = foreign_weights.write_folder(tmp_path / "folder", there.state_dict())
    with pytest.raises(CheckpointMismatch, match="cast=True converts it"):
        foreign_weights.load(path, here)
    foreign_weights.load(path, here, cast=True)
    assert here.weight.dtype == torch.float32
    assert torch.equal(here.weight, there.weight.float())


def test_nothing_but_floats_is_cast(tmp_path):
    path = foreign_weights.write_torch(tmp_path / "weights.pt", {"w": torch.ones(2, dtype=torch.complex64)})
    here = nn.Module()
    for dtype in (torch.int32, torch.float32):
        here.register_buffer("w", torch.zeros(2, dtype=dtype))
        with pytest.raises(CheckpointMismatch, match=r"has dtype \w+ here, complex64 in the files$"):
            foreign_weights.load(path, here, cast=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_numbers_too_large_for_a_dtype_are_refused(tmp_path, dtype):
    large = torch.ones(5)
    large[3] = 1e6  # only the second rank sees it
    path = foreign_weights.write_file(tmp_path / "weights", {"w": large, "v": torch.ones(5)})

    def on_rank(coordinator):
        empty = {f"model.{name}": torch.zeros(5, dtype=dtype) for name in "wv"}
        state = FlatState(empty, coordinator.rank, 2)
        with pytest.raises(CheckpointMismatch, match="'w' has numbers in the files that are too large for float"):
            load_weights(path, state, coordinator=coordinator, cast=True)
        assert not state.parts["model.v"][1].float().any()
        (left,) = load_weights(path, state, coordinator=coordinator, cast=True, strict=False)
        assert "too large" in left
        assert not state.parts["model.w"][1].float().any()
        assert (state.parts["model.v"][1].float() == 1).all()

    all_ranks(2, on_rank)


def test_a_tied_tensor_needs_to_be_there_once(tmp_path):
    weight = torch.randn(6, 4)
    for place, names in enumerate([["table.weight"], ["head.weight"], ["table.weight", "head.weight"]]):
        path = foreign_weights.write_file(tmp_path / f"weights{place}", {name: weight.clone() for name in names})
        module = _Tied()
        assert foreign_weights.load(path, module) == ()
        assert module.head.weight is module.table.weight
        assert torch.equal(module.head.weight, weight)
        assert module.angles.tolist() == [0, 1, 2]
    with pytest.raises(CheckpointMismatch, match=r"'head\.weight' is not in the files"):
        foreign_weights.load(tmp_path / "weights0", _Tied(tied=False))


def test_a_tied_tensor_that_is_there_twice_and_differs_is_refused_on_every_rank(tmp_path):
    weight, other = torch.zeros(6, 4), torch.zeros(6, 4)
    other[5, 3] = -0.0  # only the second rank sees it
    tensors = {"a": weight, "b": other, "c": torch.ones(2)}
    path = foreign_weights.write_distributed(tmp_path / "folder", tensors)

    def on_rank(coordinator):
        state = FlatState({"model.w": torch.ones(6, 4), "model.c": torch.zeros(2)}, coordinator.rank, 2)
        names = {"a": "w", "b": "w"}
        with pytest.raises(CheckpointMismatch, match=r"'a' and 'b' are both 'w' here, but differ in the files"):
            load_weights(path, state, coordinator=coordinator, names=names)
        assert not state.parts["model.c"][1].any()
        assert len(load_weights(path, state, coordinator=coordinator, names=names, strict=False)) == 1
        assert state.parts["model.w"][1].all()
        assert state.parts["model.c"][1].all()

    all_ranks(2, on_rank)


def test_persistent_buffers_are_asked_for_and_others_are_not(tmp_path):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(2)
            self.register_buffer("angles", torch.ones(2), persistent=False)

    there = Module()
    tensors = there.state_dict()
    foreign_weights.load(foreign_weights.write_file(tmp_path / "all", tensors), Module())
    del tensors["norm.running_mean"]
    with pytest.raises(CheckpointMismatch, match=r"'norm\.running_mean' is not in the files"):
        foreign_weights.load(foreign_weights.write_file(tmp_path / "some", tensors), Module())


def test_what_no_tensor_of_numbers_is_is_named(tmp_path):
    content = {
        "sparse": torch.eye(2).to_sparse(),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "epoch": 3,
        "w": torch.ones(2),
    }
    here = nn.Module()
    for name in content:
        here.register_buffer(name, torch.zeros(2))
    path = foreign_weights.write_torch(tmp_path / "weights.pt", content)
    with pytest.raises(CheckpointMismatch) as raised:
        foreign_weights.load(path, here)
    for expected in (
        "'sparse' is a tensor of layout torch.sparse_coo",
        "'quantized' is a quantized",
        "'epoch' is a int",
    ):
        assert expected in str(raised.value)
    foreign_weights.load(path, nn.ModuleDict(), names=lambda name: None)


def test_ranks_with_unlike_paths_or_modules_are_told(tmp_path):
    for name in "01":
        foreign_weights.write_file(tmp_path / name, nn.Linear(2, 2).state_dict())

    def unlike_paths(coordinator):
        return load_weights(tmp_path / str(coordinator.rank), state_of(nn.Linear(2, 2)), coordinator=coordinator)

    def unlike_modules(coordinator):
        module = nn.Linear(2, 2 + coordinator.rank)
        before = _copies(module)
        with pytest.raises(CheckpointMismatch, match=r"'weight' has shape \(3, 2\) here, \(2, 2\) in the files"):
            load_weights(tmp_path / "0", state_of(module), coordinator=coordinator)
        torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)

    for error in on_ranks(2, unlike_paths):
        assert isinstance(error, CheckpointError)
        assert "rank 1 was given the path" in str(error)
    all_ranks(2, unlike_modules)


def test_a_tensor_that_names_takes_away_is_not_said_to_be_missing_from_the_files(tmp_path):
    here = nn.Linear(2, 2)
    path = foreign_weights.write_torch(tmp_path / "weights.pt", here.state_dict())
    with pytest.raises(CheckpointMismatch) as raised:
        foreign_weights.load(path, here, names={"weight": None})
    assert "'weight' is not filled: names drops that of the files, or gives it another name" in str(raised.value)
    assert "did you mean 'weight'" not in str(raised.value)
