from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.single_rank import load, save, state_of
from torch import nn

from shard_core.checkpoint.format.tiling import tiling_flaw
from shard_core.checkpoint.state.shard import FlatPart
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.state.training_state import Slot
from shard_core.errors import CheckpointError, CheckpointMismatch


class Tied(nn.Module):
    def __init__(self, head_first: bool = False, tie: bool = True) -> None:
        super().__init__()
        names = ["head", "embedding"] if head_first else ["embedding", "head"]
        for name in names:
            self.add_module(name, nn.Linear(4, 3, bias=False))
        if tie:
            self.get_submodule(names[1]).weight = self.get_submodule(names[0]).weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + self.embedding(x)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("nothing", None)
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.scalar = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.brief = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))


def _keys(module: nn.Module) -> set[str]:
    return {shard.key for shard in state_of(module).shards()}


def test_frozen_parameters_and_persistent_buffers_are_kept_and_others_are_not(tmp_path):
    module, other = Buffers(), Buffers()
    assert _keys(module) == {f"model.{name}" for name in module.state_dict()}
    for tensor in [*module.parameters(), *module.buffers()]:
        tensor.data = tensor.data.fill_(1) if tensor.dtype is not torch.bool else ~tensor.data
    module.cache.fill_(7)
    save(tmp_path / "checkpoint", module)
    load(tmp_path / "checkpoint", other)
    torch.testing.assert_close(other.state_dict(), module.state_dict(), rtol=0, atol=0)
    assert other.cache.tolist() == [1, 1]
    assert not other.frozen.requires_grad


def test_ranks_write_parameters_in_turn_and_rank_zero_writes_all_buffers():
    module = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(3)))
    parameters = {f"model.{name}" for name, _ in module.named_parameters()}
    written = []
    for rank in range(3):
        shards = TensorState({"model": module}, {}, rank=rank, world_size=3).shards()
        written.append({shard.key for shard in shards if shard.write})
    assert all(keys & parameters for keys in written)
    assert [len(keys - parameters) for keys in written] == [9, 0, 0]
    assert set.union(*written) == {shard.key for shard in shards}


def test_wrappers_leave_no_trace_in_names():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2)))
    wanted = _keys(plain)
    plain[1] = checkpoint_wrapper(plain[1])
    plain[0] = torch.compile(plain[0], backend="eager")
    assert _keys(plain) == wanted
    assert _keys(torch.compile(plain, backend="eager")) == wanted


def test_a_users_own_submodule_called_module_keeps_its_name():
    average = torch.optim.swa_utils.AveragedModel(nn.Linear(2, 2))
    assert _keys(average) == {"model.module.weight", "model.module.bias", "model.n_averaged"}


@pytest.mark.parametrize("head_first", [False, True])
def test_tied_tensors_are_stored_once_and_load_under_either_name(tmp_path, head_first):
    model, other = Tied(), Tied(head_first)
    optimizer, restored = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save(tmp_path / "checkpoint", model, optimizer)
    manifest = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())
    assert manifest["aliases"] == {"model.head.weight": "model.embedding.weight"}
    assert [key for key in manifest["tensors"] if key.startswith("model.")] == ["model.embedding.weight"]
    load(tmp_path / "checkpoint", other, restored)
    assert other.head.weight is other.embedding.weight
    assert torch.equal(other.head.weight, model.head.weight)
    state = [next(iter(each.state.values())) for each in (optimizer, restored)]
    torch.testing.assert_close(*state, rtol=0, atol=0)


def test_a_tied_checkpoint_loads_into_untied_modules_and_not_the_reverse(tmp_path):
    tied, untied = Tied(), Tied(tie=False)
    optimizer, two = (torch.optim.AdamW(each.parameters()) for each in (tied, untied))
    tied(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save(tmp_path / "tied", tied, optimizer)
    load(tmp_path / "tied", untied, two)
    assert torch.equal(untied.head.weight, tied.head.weight)
    assert torch.equal(untied.embedding.weight, tied.head.weight)
    assert len(two.state) == 2
    save(tmp_path / "untied", untied)
    with pytest.raises(
        CheckpointMismatch, match=r"'model.head.weight' is tied to 'embedding.weight' here, but kept apart"
    ):
        load(tmp_path / "untied", tied)


def test_a_single_module_loads_under_another_key(tmp_path):
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    save(tmp_path / "checkpoint", {"generator": module})
    load(tmp_path / "checkpoint", {"anything": other})
    assert torch.equal(module.weight, other.weight)


def test_one_of_several_modules_loads_by_its_key(tmp_path):
    modules = {"generator": nn.Linear(2, 3), "critic": nn.Linear(3, 1)}
    optimizers = {f"{key}-optimizer": torch.optim.AdamW(module.parameters()) for key, module in modules.items()}
    for key, module in modules.items():
        module(torch.ones(1, module.in_features)).sum().backward()
        optimizers[f"{key}-optimizer"].step()
    save(tmp_path / "checkpoint", modules, optimizers)
    keys = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())["tensors"]
    assert {"model.critic.weight", "optim.generator.bias.exp_avg"} <= keys.keys()

    other = nn.Linear(3, 1)
    restored = torch.optim.AdamW(other.parameters())
    loaded = load(tmp_path / "checkpoint", {"critic": other}, {"optimizer": restored})
    assert torch.equal(other.weight, modules["critic"].weight)
    wanted = optimizers["critic-optimizer"].state[modules["critic"].weight]
    torch.testing.assert_close(restored.state[other.weight], wanted, rtol=0, atol=0)
    assert loaded.remainder == ("generator", "generator-optimizer")
    with pytest.raises(CheckpointMismatch, match=r"module 'critics' is not in the checkpoint; did you mean 'critic'\?"):
        load(tmp_path / "checkpoint", {"critics": other})
    save(tmp_path / "one", {"critic": other})
    with pytest.raises(CheckpointMismatch, match="in 1 ways"):
        load(tmp_path / "one", modules)


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    class Extra(nn.Module):
        def get_extra_state(self):
            return {"a": 1}

    with pytest.raises(CheckpointError, match=r"module 'model' keeps '0._extra_state'"):
        state_of(nn.Sequential(Extra()))
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"'model.weight' is on the meta device"):
        save(tmp_path / "checkpoint", empty)
    double = nn.Module()
    double.register_buffer("wave", torch.ones(2, dtype=torch.complex128))
    with pytest.raises(CheckpointError, match=r"'model.wave' has dtype complex128"):
        save(tmp_path / "checkpoint", double)
    sparse = nn.Module()
    sparse.register_buffer("links", torch.eye(2).to_sparse())
    with pytest.raises(CheckpointError, match=r"'model.links' has layout torch.sparse_coo"):
        save(tmp_path / "checkpoint", sparse)
    with pytest.raises(CheckpointError, match=r"'a.b' cannot have a dot"):
        state_of({"a.b": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    assert not (tmp_path / "checkpoint").exists()


def test_copies_are_written_by_ranks_in_turn_evenly_by_bytes():
    module = nn.ModuleList([nn.Linear(8, size) for size in (64, 3, 8, 1, 40, 40, 5)])
    states = [TensorState({"model": module}, {}, rank=rank, world_size=3).shards() for rank in range(3)]
    writers = [[shard.write for shard in shards] for shards in states]
    assert all(sum(ranks) == 1 for ranks in zip(*writers, strict=True))
    written = [sum(shard.view.nbytes for shard in shards if shard.write) for shards in states]
    assert max(written) - min(written) <= max(shard.view.nbytes for shard in states[0])


def test_views_in_any_memory_order_round_trip(tmp_path):
    convolution = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    other = nn.Conv2d(3, 4, 2)
    save(tmp_path / "checkpoint", convolution)
    load(tmp_path / "checkpoint", other)
    assert torch.equal(convolution.weight, other.weight)


def flat(
    module: nn.Module, optimizer: torch.optim.Optimizer, ranges: dict[str, tuple[int, int]], rank: int
) -> TensorState:
    """Set an optimizer to step a range of each parameter, and describe what this rank then has."""
    parts = {}
    for name, parameter in module.named_parameters():
        start, stop = ranges[name]
        values = nn.Parameter(parameter.detach().flatten()[start:stop].clone())
        parts[parameter] = FlatPart(shape=tuple(parameter.shape), start=start, values=values)
    for group in optimizer.param_groups:
        group["params"][:] = [parts[parameter].values for parameter in group["params"]]
    return TensorState({"model": module}, {"optimizer": optimizer}, rank=rank, world_size=2, flat_part=parts.get)


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.scalar = nn.Parameter(torch.tensor(7.0))


def test_flat_parts_tile_the_parameters_and_their_state() -> None:
    shards: dict[str, list[Any]] = {}
    for rank, ranges in enumerate(({"matrix": (0, 4), "scalar": (0, 0)}, {"matrix": (4, 6), "scalar": (0, 1)})):
        module = Whole()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        state = flat(module, optimizer, ranges, rank)
        for group in optimizer.param_groups:
            for part in group["params"]:
                part.grad = part.detach().clone()
        optimizer.step()
        for shard in state.shards():
            shards.setdefault(shard.key, []).append(shard)
        (record,) = state.optimizers().values()
        assert [group["params"] for group in record.groups] == [["matrix", "scalar"]]
        assert {name: sorted(slots) for name, slots in record.scalars.items()} == {
            "matrix": ["step"],
            "scalar": ["step"],
        }
    assert sorted(shards) == sorted(
        [
            "model.matrix",
            "model.scalar",
            *(f"optim.{n}.{s}" for n in ("matrix", "scalar") for s in ("exp_avg", "exp_avg_sq")),
        ]
    )
    for key, parts in shards.items():
        filled = [part for part in parts if part.view.numel() and part.write]
        shape = (2, 3) if "matrix" in key else ()
        assert all(part.shape == shape for part in parts)
        boxes = [(part.box.offsets, part.box.sizes) for part in filled]
        offsets, sizes = (np.array([each[k] for each in boxes]).reshape(len(boxes), len(shape)) for k in (0, 1))
        assert tiling_flaw(shape, offsets, sizes) is None, key


def test_room_for_state_of_a_flat_part_is_of_its_size() -> None:
    module = Whole()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    state = flat(module, optimizer, {"matrix": (1, 5), "scalar": (0, 1)}, 0)
    slot = {"module": "model", "slot": "exp_avg", "dtype": torch.float32}
    state.prepare_load([Slot(name="matrix", shape=(2, 3), parameter_shape=(2, 3), **slot)])
    boxes = [(shard.box.offsets, shard.box.sizes) for shard in state.shards() if shard.key == "optim.matrix.exp_avg"]
    assert boxes == [((0, 1), (1, 2)), ((1, 0), (1, 2))]
