"""Weights that another library has written fill the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from shard_core.testing import models, oracle
from shard_core.testing.bits import Assorted, Bits, assert_same_bits, samples
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, step, whole_weights

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject

#: The other name of a weight that stands in the file once.
_TIED = "again.weight"


class Weights(Suite):
    """Weights that another library has written fill the module."""

    @promise(after=("averages_gradients", "ties_stay_tied", "frozen_parameters_stay_frozen", "buffers_are_right"))
    def test_weights_of_others_fill_the_module(self, ranks: Ranks, tmp_path: Path) -> None:
        """A safetensors file brings what plain PyTorch loads from it, bit for bit, on every rank.

        Training goes on from there. A tied weight stands in the file under one of its names.

        Usual cause:
            Only rank 0 fills what it holds, or the optimizer steps a copy of the weights that was not filled.
        """
        file = tmp_path / "model.safetensors"
        _write(file)
        expected, stepped = _plainly(file)
        for rank, (loaded, after) in enumerate(ranks.run(fills, file)):
            assert_same_bits(f"after load_weights on rank {rank}", loaded, expected)
            oracle.assert_same_weights(after, stepped, 1e-5)


def fills(subject: Subject, file: Path) -> tuple[Bits, Bits]:
    """Load a file into a module drawn from another seed; give all weights, and once more after a step."""
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, Assorted, "sgd", seed=1)
        strategy.load_weights(file, model)
        loaded = whole_weights(strategy, model)
        step(strategy, model, optimizer, samples(1)[0])
        return loaded, whole_weights(strategy, model)


def _write(file: Path) -> None:
    torch.manual_seed(2)
    save_file({name: tensor for name, tensor in Assorted().state_dict().items() if name != _TIED}, file)


def _plainly(file: Path) -> tuple[Bits, Bits]:
    """Train the same way in plain PyTorch."""
    model = Assorted()
    lacking = model.load_state_dict(load_file(file), strict=False)
    assert lacking.missing_keys == [_TIED]
    loaded = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = models.make_optimizer("sgd", model)
    model(*samples(1)[0]).backward()
    optimizer.step()
    return loaded, model.state_dict()
