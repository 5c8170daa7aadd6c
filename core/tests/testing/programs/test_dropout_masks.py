"""Masks that a device draws by a generator of its own are checked, and the oracle goes on with them."""

import torch

from shard_core.testing.programs import operations as ops
from shard_core.testing.programs.model import Model, batch, loss_of
from shard_core.testing.programs.parts.dropout import SHARE, why_improper
from shard_core.testing.programs.plain.oracle import Oracle
from shard_core.testing.programs.program import ModelSpec, OptimizerSpec, Program

PROGRAM = Program(seed=3, strategy="ddp", models=(ModelSpec(parts=("dropout",)),), optimizers=(OptimizerSpec(),))


def mask(seed: int, kept: float = 1 - SHARE) -> torch.Tensor:
    return torch.rand(3, 4, 8, generator=torch.Generator().manual_seed(seed)) < kept


def test_masks_keep_their_share_and_are_all_apart() -> None:
    assert not why_improper({0: [mask(0), mask(1)], 1: [mask(2), torch.empty(0, 4, 8, dtype=torch.bool)]})
    assert why_improper({0: [mask(0)], 1: [mask(1, kept=0.3)]}).startswith("data rank 1 keeps")
    assert why_improper({0: [mask(0)], 1: [mask(1), mask(0)]}) == "data ranks 0 and 1 draw the same mask"
    assert why_improper({1: [mask(0), mask(0)]}) == "data rank 1 repeats"
    assert why_improper({1: [mask(0)]}, [mask(1), mask(0)]) == "data rank 1 draws a mask again"


def test_the_oracle_draws_the_masks_it_is_given() -> None:
    oracle = Oracle(PROGRAM, 2, {"ddp": False})
    generators = [each.clone() for each in oracle.generators]
    given = {0: [mask(0)], 1: [mask(1)]}
    oracle.masks.update({rank: list(masks) for rank, masks in given.items()})
    shown = oracle.play(ops.Backward(key=5, rows=(3, 3)))
    torch.manual_seed(PROGRAM.seed)
    model = Model("dropout")
    for rank, (kept,) in given.items():
        drawn = batch(5, rank, 3)
        out = torch.tanh(model.parts["dropout"].layer(drawn.inputs)) * kept / (1 - SHARE)
        hidden = drawn.inputs + out
        assert torch.equal(shown[rank]["loss"], loss_of(model.head(hidden.mean(1)), drawn).detach())
    assert all(map(torch.equal, generators, oracle.generators))
    assert oracle.masks == given


def test_masks_that_no_forward_has_drawn_are_not_the_oracles() -> None:
    oracle = Oracle(PROGRAM, 1, {"ddp": False})
    oracle.masks[0] = [mask(0), mask(1)]
    oracle.play(ops.Forward(key=5, how="no_grad"))
    assert len(oracle.masks[0]) == 1
    oracle.masks[0] = [mask(0)]
    oracle.play(ops.Forward(key=5, how="eval"))
    assert oracle.masks[0] == []
