from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from fixtures.bits import assert_same_bits
from fixtures.single_rank import load, save
from fixtures.thread_ranks import all_ranks, on_ranks
from torch import nn

from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.gather import full_tensors
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.errors import CheckpointError

KINDS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x * self.scale


def built(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    module, generator = Uneven(), torch.Generator().manual_seed(seed)  # ranks are threads: they share torch's own
    with torch.no_grad():
        for layer in module.layers:
            layer.weight.copy_(torch.randn(4, 4, generator=generator))
            layer.bias.copy_(torch.randn(4, generator=generator))
        module.scale.fill_(1.0 + seed)
    return module, KINDS[kind](module.parameters())


def step(module: nn.Module, optimizer: torch.optim.Optimizer, seed: int, own: Any = None) -> None:
    """Step all parameters, or this rank's own, which is what the others' owners do with theirs."""
    module(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    (group,) = optimizer.param_groups
    every = list(group["params"])
    group["params"][:] = [each for each in every if own is None or own(each)]
    optimizer.step()
    group["params"][:] = every
    optimizer.zero_grad()


class Owner:
    """One rank of a world in which ranks own whole parameters in turn."""

    def __init__(self, kind: str, coordinator: Any, seed: int = 0) -> None:
        self.module, self.optimizer = built(kind, seed)
        self.coordinator = coordinator
        self._place = {id(each): place for place, each in enumerate(self.module.parameters())}

    def owns(self, parameter: torch.Tensor) -> bool:
        return self._place[id(parameter)] % self.coordinator.world_size == self.coordinator.rank

    def step(self, seed: int, truth: nn.Module) -> None:
        step(self.module, self.optimizer, seed, self.owns)
        # As the owners' broadcasts bring them.
        self.module.load_state_dict(truth.state_dict())

    def state(self, owned: Any = None) -> TensorState:
        rank, size = self.coordinator.rank, self.coordinator.world_size
        modules, optimizers = {"model": self.module}, {"optimizer": self.optimizer}
        state = TensorState(modules, optimizers, rank=rank, world_size=size, owned=owned or self.owns)
        state.exchange(self.coordinator)
        return state

    def save(self, path: Any, **options: Any) -> None:
        io = ShardedCheckpointIO()
        io.save(path, self.state(), {}, coordinator=self.coordinator, information={}, **options)

    def load(self, path: Any, **options: Any) -> Any:
        return ShardedCheckpointIO().load(path, self.state(), coordinator=self.coordinator, **options)


def trained(kind: str) -> list[nn.Module]:
    """Return what plain training has after each of two steps, and its optimizer in the end."""
    module, optimizer = built(kind)
    after = []
    for seed in (1, 2):
        step(module, optimizer, seed)
        after.append(copy.deepcopy(module))
    return [*after, optimizer]


def flat(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    (group,) = optimizer.param_groups
    return {
        f"{place}.{slot}": torch.as_tensor(value)
        for place, parameter in enumerate(group["params"])
        for slot, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def save_at(world_size: int, kind: str, path: Any, **options: Any) -> None:
    truth = trained(kind)[0]

    def on_rank(coordinator: Any) -> None:
        owner = Owner(kind, coordinator)
        owner.step(1, truth)
        owner.save(path, **options)

    all_ranks(world_size, on_rank)


@pytest.mark.parametrize(
    ("world_size", "kind", "form"),
    [(1, "adamw", "sharded"), (2, "momentum", "sharded"), (2, "sgd", "sharded"), (3, "adamw", "full")],
)
def test_owners_state_loads_into_plain_training_and_back(tmp_path, world_size, kind, form):
    save_at(world_size, kind, tmp_path / "owned", state_dict_type=form)
    assert verify(tmp_path / "owned").is_fine
    after_one, after_two, wanted = trained(kind)
    module, optimizer = built(kind, seed=7)
    load(tmp_path / "owned", module, optimizer)
    assert_same_bits(module.state_dict(), after_one.state_dict())
    save(tmp_path / "plain", module, optimizer)
    step(module, optimizer, 2)
    assert_same_bits(module.state_dict(), after_two.state_dict())
    assert_same_bits(flat(optimizer), flat(wanted))

    def go_on(coordinator: Any) -> dict[str, torch.Tensor]:
        owner = Owner(kind, coordinator, seed=7)
        owner.load(tmp_path / "plain")
        assert_same_bits(owner.module.state_dict(), after_one.state_dict())
        assert all(map(owner.owns, owner.optimizer.state)), "state of another owner's parameter came along"
        step(owner.module, owner.optimizer, 2, owner.owns)
        return flat(owner.optimizer)

    held = all_ranks(3, go_on)
    assert sum(map(len, held)) == len(flat(wanted))
    assert_same_bits({name: each for mine in held for name, each in mine.items()}, flat(wanted))


def test_every_rank_lists_every_tensor_and_the_same_records():
    truth = trained("adamw")[0]

    def on_rank(coordinator: Any) -> Any:
        owner = Owner("adamw", coordinator)
        owner.step(1, truth)
        state = owner.state()
        record = state.optimizers()["optimizer"]
        slots = [each for each in state.shards() if each.key.startswith("optim.")]
        gathered = {key: each for key, each in full_tensors(state, coordinator) if key.startswith("optim.")}
        return record.scalars, [(each.key, each.shape) for each in slots], {e.key for e in slots if e.write}, gathered

    scalars, listed, written, gathered = zip(*all_ranks(3, on_rank), strict=True)
    assert scalars[0] == scalars[1] == scalars[2]
    assert len(scalars[0]) == len(list(truth.parameters())) - 1  # all but what no loss reached
    assert listed[0] == listed[1] == listed[2]
    assert sum(map(len, written)) == len(set().union(*written)) == len(listed[0])
    assert gathered[0]["optim.layers.2.weight.exp_avg"].shape == (4, 4)
    assert_same_bits(gathered[0], gathered[2])


def test_state_is_loaded_where_another_checkpoint_stands_after_a_first(tmp_path):
    """What a first load made ready and did not take is not taken for state that is there."""
    save_at(2, "adamw", tmp_path / "moments")
    save_at(2, "sgd", tmp_path / "none")

    def on_rank(coordinator: Any) -> int:
        owner = Owner("adamw", coordinator, seed=7)
        owner.load(tmp_path / "moments")
        held = len(flat(owner.optimizer))
        owner = Owner("sgd", coordinator, seed=7)
        owner.load(tmp_path / "none")
        assert not owner.optimizer.state
        return held

    assert all(all_ranks(2, on_rank))


def test_filtered_saves_keep_whole_parameters(tmp_path):
    save_at(2, "adamw", tmp_path / "some", filter=lambda key: "layers.0" in key or "optim" not in key)

    def on_rank(coordinator: Any) -> set[str]:
        owner = Owner("adamw", coordinator, seed=7)
        owner.load(tmp_path / "some", strict=False)
        names = {id(each): name for name, each in owner.module.named_parameters()}
        return {names[id(each)] for each in owner.optimizer.state}

    assert set().union(*all_ranks(2, on_rank)) == {"layers.0.weight", "layers.0.bias"}


def refusals(owned: Any) -> list[str]:
    def on_rank(coordinator: Any) -> None:
        Owner("adamw", coordinator).state(owned(coordinator))

    found = on_ranks(2, on_rank)
    assert all(isinstance(each, CheckpointError) for each in found), found
    return [str(each) for each in found]


def test_a_parameter_without_an_owner_is_named_on_every_rank():
    first, second = refusals(lambda coordinator: lambda parameter: parameter.dim() == 2)
    assert first == second
    assert first.startswith("no rank owns 'scale', which optimizer 'optimizer' steps")


def test_what_one_owner_cannot_save_is_refused_on_every_rank():
    def on_rank(coordinator: Any) -> None:
        owner = Owner("adamw", coordinator)
        if coordinator.rank == 1:
            bias = owner.module.layers[0].bias
            owner.optimizer.state[bias]["exp_avg"] = torch.zeros(4).to_sparse()
        owner.state()

    found = on_ranks(2, on_rank)
    assert all(isinstance(each, CheckpointError) for each in found), found
    assert [str(each) for each in found] == [
        "describing optimizer state failed on 1 of 2 ranks: rank 1: 'layers.0.bias.exp_avg' has layout "
        "torch.sparse_coo; only dense tensors can be saved, call to_dense()."
    ] * 2


def test_owners_exchange_before_they_answer():
    module, optimizer = built("adamw")
    state = TensorState({"model": module}, {"optimizer": optimizer}, rank=0, world_size=1, owned=lambda _: True)
    for answer in (state.shards, state.optimizers):
        with pytest.raises(CheckpointError, match=r"call exchange\(coordinator\) on every rank first"):
            answer()
