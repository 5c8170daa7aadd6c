from __future__ import annotations

import pytest
import torch
from fixtures.flat_state import FlatState
from fixtures.single_rank import load, save, state_of
from fixtures.thread_ranks import all_ranks, on_ranks
from torch import nn

from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointCorrupted, CheckpointError, CheckpointMismatch, CheckpointNotFound


def _wide(count: int) -> nn.Module:
    return nn.ModuleDict({f"layer{number}": nn.Linear(2, 2) for number in range(count)})


def test_all_differences_are_listed_at_once_and_nothing_is_touched(tmp_path):
    saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1, dtype=torch.float64))
    save(tmp_path / "checkpoint", saved, torch.optim.AdamW(saved.parameters()))
    here = nn.Sequential(nn.Linear(2, 4), nn.Linear(3, 3, bias=False), nn.Identity(), nn.Linear(3, 1), nn.Linear(1, 1))
    before = {key: value.clone() for key, value in here.state_dict().items()}
    optimizer = torch.optim.AdamW(here.parameters(), lr=0.5)
    with pytest.raises(CheckpointMismatch) as raised:
        load(tmp_path / "checkpoint", here, optimizer)
    message = str(raised.value)
    for difference in (
        "'model.0.weight' has shape (4, 2) here, (3, 2) in the checkpoint",
        "'model.1.bias' is not here, but in the checkpoint",
        "'model.2.running_mean' is not here, but in the checkpoint",
        "'model.3.weight' has dtype F32 here, F64 in the checkpoint",
        "'model.4.weight' is not in the checkpoint",
        "optimizer 'optimizer' steps '4.weight', for which the checkpoint has no optimizer",
        "optimizer 'optimizer' of the checkpoint steps '1.bias', which no optimizer here does",
    ):
        assert difference in message
    torch.testing.assert_close(here.state_dict(), before, rtol=0, atol=0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_what_fits_is_loaded_when_asked_and_the_rest_is_returned(tmp_path):
    saved = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.5)
    saved(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(tmp_path / "checkpoint", saved, optimizer)
    here = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 4))
    restored = torch.optim.AdamW(here.parameters(), lr=0.1)
    head = here[2].weight.clone()
    loaded = load(tmp_path / "checkpoint", here, restored, strict=False)
    assert torch.equal(here[1].weight, saved[1].weight)
    assert torch.equal(here[2].weight, head)
    assert set(restored.state) == {*here[0].parameters(), *here[1].parameters()}
    assert restored.param_groups[0]["lr"] == 0.5
    assert any("'model.2.weight' has shape (4, 3) here, (1, 3)" in difference for difference in loaded.differences)
    here(torch.ones(1, 2)).sum().backward()
    restored.step()


def test_long_lists_of_differences_are_bounded(tmp_path):
    save(tmp_path / "checkpoint", _wide(2))
    with pytest.raises(CheckpointMismatch, match="differ in 996 ways") as raised:
        load(tmp_path / "checkpoint", _wide(500))
    assert "- and 976 more" in str(raised.value)
    assert len(str(raised.value)) < 4000


def test_values_load_without_any_module(tmp_path):
    save(tmp_path / "checkpoint", nn.Linear(2, 2), values={"step": 3})
    io = ShardedCheckpointIO()
    (loaded,) = all_ranks(1, lambda coordinator: io.load(tmp_path / "checkpoint", None, coordinator=coordinator))
    assert loaded.values == {"step": 3}
    assert loaded.remainder == ("model",)


def test_states_without_any_tensor_are_states(tmp_path):
    save(tmp_path / "bare", nn.Identity(), values={"step": 1})
    assert load(tmp_path / "bare", nn.Identity()).values == {"step": 1}
    save(tmp_path / "empty", {}, values={"step": 2})
    assert load(tmp_path / "empty", {}).values == {"step": 2}
    save(tmp_path / "module", nn.Linear(1, 1))
    assert load(tmp_path / "module", {}).remainder == ("model",)


def test_a_hyper_parameter_that_a_later_release_added_keeps_its_value(tmp_path):
    module = nn.Linear(2, 2)
    older, newer = torch.optim.AdamW(module.parameters(), lr=0.5), torch.optim.AdamW(module.parameters())
    for name in (older.defaults, older.param_groups[0]):
        del name["maximize"]
    save(tmp_path / "checkpoint", module, older)
    load(tmp_path / "checkpoint", module, newer)
    assert newer.param_groups[0]["maximize"] is False
    assert newer.param_groups[0]["lr"] == 0.5
    save(tmp_path / "newer", module, newer)
    with pytest.raises(CheckpointMismatch, match="has no 'maximize', which the checkpoint's AdamW has"):
        load(tmp_path / "newer", module, older)


def test_optimizers_that_are_not_asked_for_stay_in_the_checkpoint(tmp_path):
    module = nn.Linear(2, 2)
    save(tmp_path / "checkpoint", module, torch.optim.AdamW(module.parameters()))
    assert load(tmp_path / "checkpoint", module).remainder == ("optimizer",)


def test_a_mismatch_on_one_rank_is_raised_on_all(tmp_path):
    save(tmp_path / "checkpoint", nn.Linear(4, 4))

    def load_on(coordinator):
        module = nn.Linear(4, 4 + coordinator.rank)
        state = TensorState({"model": module}, {}, rank=coordinator.rank, world_size=2)
        before = module.weight.clone()
        with pytest.raises(
            CheckpointMismatch, match=r"failed on 1 of 2 ranks: rank 1: (.|\n)*'model.weight' has shape \(5, 4\)"
        ):
            ShardedCheckpointIO().load(tmp_path / "checkpoint", state, coordinator=coordinator)
        assert torch.equal(module.weight, before)

    all_ranks(2, load_on)


def test_damage_that_one_rank_needs_keeps_every_rank_from_changing_anything(tmp_path):
    tensors = {"model.w": torch.arange(1 << 21, dtype=torch.float64)}

    def save_on(coordinator):
        state = FlatState(tensors, coordinator.rank, 2)
        ShardedCheckpointIO().save(tmp_path / "c", state, {}, coordinator=coordinator, information={})

    all_ranks(2, save_on)
    path = tmp_path / "c" / "model-00001-of-00002.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 4
    path.write_bytes(raw)

    def load_on(coordinator):
        state = FlatState({"model.w": torch.zeros(1 << 21, dtype=torch.float64)}, coordinator.rank, 2)
        with pytest.raises(
            CheckpointCorrupted, match=r"rank 1: 1 tensor is damaged: 'model.w' in model-00001-of-00002"
        ):
            ShardedCheckpointIO().load(tmp_path / "c", state, coordinator=coordinator)
        assert not state.parts["model.w"][1].any()

    all_ranks(2, load_on)


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_replicas_and_flat_shards_read_one_another(tmp_path, form):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    wanted = {f"model.{name}": tensor.detach().clone() for name, tensor in module.named_parameters()}

    def save_on(coordinator):
        state = TensorState({"model": module}, {}, rank=coordinator.rank, world_size=3)
        ShardedCheckpointIO().save(
            tmp_path / "replicas", state, {}, coordinator=coordinator, information={}, state_dict_type=form
        )

    def load_on(coordinator):
        state = FlatState({key: torch.zeros_like(tensor) for key, tensor in wanted.items()}, coordinator.rank, 2)
        io = ShardedCheckpointIO()
        io.load(tmp_path / "replicas", state, coordinator=coordinator)
        io.save(tmp_path / "flat", state, {}, coordinator=coordinator, information={}, state_dict_type=form)

    all_ranks(3, save_on)
    all_ranks(2, load_on)
    other = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    load(tmp_path / "flat", other)
    for name, tensor in other.named_parameters():
        assert torch.equal(tensor, wanted[f"model.{name}"])


def test_a_filter_keeps_what_it_chooses_and_forgets_half_kept_optimizer_state(tmp_path):
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(tmp_path / "weights", module, optimizer, filter=lambda key: key.startswith("model."))
    other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    load(tmp_path / "weights", other)
    assert torch.equal(other[1].weight, module[1].weight)
    with pytest.raises(CheckpointMismatch, match="for which the checkpoint has no optimizer"):
        load(tmp_path / "weights", other, torch.optim.AdamW(other.parameters()))
    save(tmp_path / "adapter", module, optimizer, filter=lambda key: ".1." in key)
    fresh = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    restored = torch.optim.AdamW(fresh.parameters())
    load(tmp_path / "adapter", fresh, restored, strict=False)
    assert torch.equal(fresh[1].weight, module[1].weight)
    assert set(restored.state) == {*fresh[1].parameters()}


def test_paths_that_are_no_checkpoint_get_a_sentence(tmp_path):
    module = nn.Linear(2, 2)
    save(tmp_path / "run" / "step-100", module)
    (tmp_path / "run" / "step-200").mkdir()
    (tmp_path / "file").touch()
    for path, sentence in {
        "run": r"is no committed checkpoint: it has no manifest.json; it holds these checkpoints: '.*step-100'",
        "run/step-10": r"does not exist; did you mean 'step-100'\?",
        "run/step-200": r"is no committed checkpoint",
        "file": "is a file; a checkpoint is a folder",
        "nowhere/at/all": "does not exist",
    }.items():
        with pytest.raises(CheckpointNotFound, match=sentence):
            load(tmp_path / path, module)


def test_ranks_with_unlike_paths_are_told(tmp_path):
    save(tmp_path / "0", nn.Linear(2, 2))

    def load_on(coordinator):
        state = state_of(nn.Linear(2, 2))
        return ShardedCheckpointIO().load(tmp_path / str(coordinator.rank), state, coordinator=coordinator)

    for error in on_ranks(2, load_on):
        assert isinstance(error, CheckpointError)
        assert "rank 1 was given the path" in str(error)


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_a_load_counts_as_a_change_of_what_it_fills(tmp_path, form):
    saved = nn.Linear(2, 3)
    save(tmp_path / "checkpoint", saved, state_dict_type=form)
    here = nn.Linear(2, 3)
    loss = here(torch.ones(1, 2, requires_grad=True)).square().sum()
    load(tmp_path / "checkpoint", here)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_views_that_compute_what_they_show_are_filled(tmp_path):
    saved, here = (nn.Module() for _ in range(2))
    saved.register_buffer("values", torch.randn(3, dtype=torch.complex64))
    here.register_buffer("values", torch.zeros(3, dtype=torch.complex64).conj())
    save(tmp_path / "checkpoint", saved)
    load(tmp_path / "checkpoint", here)
    assert torch.equal(here.values, saved.values)
