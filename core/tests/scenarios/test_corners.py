"""What is rare meets what is rare: nothing to store, tied names, filters, and the form of one file."""

from __future__ import annotations

import pytest
import torch
from fixtures.bits import same_bits
from fixtures.single_rank import load, save
from fixtures.thread_ranks import all_ranks
from torch import nn

from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState

FORMS = pytest.mark.parametrize("form", ["sharded", "full"])


class Odd(nn.Module):
    """A tie, parameters without elements, one without dims, one that is frozen, and one without a gradient."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, 4, bias=False)
        self.outer = nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.none = nn.Parameter(torch.empty(0))
        self.scale = nn.Parameter(torch.rand(()))
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.unused = nn.Parameter(torch.rand(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x)).sum() * self.scale + self.nothing.sum() + self.none.sum()


def _trained(seed: int, steps: int = 2) -> tuple[Odd, torch.optim.Optimizer]:
    module = Odd(seed)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 * (seed + 1), amsgrad=True)
    for _ in range(steps):
        module(torch.ones(2, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return module, optimizer


def _tensors(module: nn.Module, optimizer: torch.optim.Optimizer, chosen: str = "") -> dict[str, torch.Tensor]:
    named = {name: parameter for name, parameter in module.named_parameters() if name.startswith(chosen)}
    found = {name: parameter.detach() for name, parameter in named.items()}
    slots = ((name, optimizer.state.get(parameter, {})) for name, parameter in named.items())
    return found | {f"{name}:{slot}": value for name, kept in slots for slot, value in kept.items()}


def _assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert same_bits(found[key], value), key


@FORMS
@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("steps", [0, 1])
def test_parameters_without_elements_and_tied_ones_come_back_with_their_state(tmp_path, form, world_size, steps):
    module, optimizer = _trained(0)

    def save_on(coordinator):
        optimizers = {"optimizer": optimizer}
        state = TensorState({"model": module}, optimizers, rank=coordinator.rank, world_size=world_size)
        io = ShardedCheckpointIO()
        io.save(tmp_path / "c", state, {}, coordinator=coordinator, information={}, state_dict_type=form)

    all_ranks(world_size, save_on)
    assert verify(tmp_path / "c").is_fine
    other, restored = _trained(1, steps)
    load(tmp_path / "c", other, restored)
    _assert_same(_tensors(other, restored), _tensors(module, optimizer))
    assert other.outer.weight is other.inner.weight
    for each, stepped in ((module, optimizer), (other, restored)):
        each(torch.ones(2, 4)).backward()
        stepped.step()
    _assert_same(_tensors(other, restored), _tensors(module, optimizer))


@FORMS
def test_a_filter_takes_a_parameter_with_its_state_or_neither(tmp_path, form):
    module, optimizer = _trained(0)
    save(tmp_path / "c", module, optimizer, filter=lambda key: ".inner." in key, state_dict_type=form)
    other, restored = _trained(1)
    untouched = {key: value.clone() for key, value in _tensors(other, restored).items() if not key.startswith("inner")}
    found = load(tmp_path / "c", other, restored, strict=False)
    assert any("'model.scale' is not in the checkpoint" in difference for difference in found.differences)
    _assert_same(_tensors(other, restored, "inner"), _tensors(module, optimizer, "inner"))
    now = _tensors(other, restored)
    _assert_same({key: value for key, value in now.items() if not key.startswith("inner")}, untouched)


@FORMS
def test_a_filter_that_takes_nothing_leaves_a_checkpoint_of_the_values(tmp_path, form):
    module, optimizer = _trained(0)
    save(tmp_path / "c", module, optimizer, {"step": 3}, filter=lambda key: False, state_dict_type=form)
    assert verify(tmp_path / "c").is_fine
    other, restored = _trained(1)
    before = {key: value.clone() for key, value in _tensors(other, restored).items()}
    assert load(tmp_path / "c", other, restored, strict=False).values == {"step": 3}
    _assert_same(_tensors(other, restored), before)
