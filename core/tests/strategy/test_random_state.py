"""Random numbers after a load go on where those of the checkpoint stood."""

from __future__ import annotations

import random

import numpy as np
import torch

from shard_core import get_strategy
from shard_core.randomness import generator_states, set_generator_states


def drawn():
    return random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))


def small(strategy, seed):
    strategy.seed_everything(seed)
    with strategy.module_init_context():
        module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module, (optimizer,) = strategy.setup_module_and_optimizers(module, [optimizer])
    return {"model": module, "optimizer": optimizer}


def save_and_draw(path):
    with get_strategy("ddp") as strategy:
        state = small(strategy, 0)
        drawn()  # so that a Gaussian is kept for later
        strategy.save_checkpoint(path, state)
        return drawn()


def load_and_draw(name, path, keys=("model", "optimizer")):
    with get_strategy(name) as strategy:
        state = small(strategy, 1)
        before = generator_states(torch.device("cpu"))
        left = strategy.load_checkpoint(path, {key: state[key] for key in keys})
        now = drawn()
        set_generator_states(before, torch.device("cpu"))
        return now, drawn(), left


def test_every_rank_goes_on_where_it_stood(worlds, tmp_path):
    expected = worlds(2).run(save_and_draw, tmp_path / "saved")
    assert expected[0] != expected[1]
    answers = worlds(2).run(load_and_draw, "ddp", tmp_path / "saved")
    assert [now for now, _, _ in answers] == expected
    assert all(left == {} for _, _, left in answers)


def test_other_ranks_derive_theirs_from_where_the_first_stood(worlds, tmp_path):
    saved = worlds(2).run(save_and_draw, tmp_path / "saved")
    first = [now for now, _, _ in worlds(3).run(load_and_draw, "ddp", tmp_path / "saved")]
    again = [now for now, _, _ in worlds(3).run(load_and_draw, "ddp", tmp_path / "saved")]
    assert first == again
    assert len({*first, *saved}) == 5


def test_a_load_without_an_optimizer_leaves_them_alone(worlds, tmp_path):
    worlds(1).run(save_and_draw, tmp_path / "saved")
    ((now, undisturbed, _),) = worlds(1).run(load_and_draw, "single", tmp_path / "saved", ("model",))
    assert now == undisturbed
