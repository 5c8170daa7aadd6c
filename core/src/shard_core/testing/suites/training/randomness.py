"""Seeds give the same weights everywhere and dropout masks that differ where they must."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn
from torch.nn import functional

from shard_core.testing import models, oracle
from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.suites.training.runs import Run, train
from shard_core.testing.training import set_up, whole_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shard_core.strategy import Strategy
    from shard_core.testing.strategy_under_test import Ranks, Subject

_SEED = 7
_DROPPED = 0.25
_ROWS, _COLUMNS = 512, 8
_STEPS = 3


class Randomness(Suite):
    """Seeds give the same weights everywhere and dropout masks that differ where they must."""

    @pytest.mark.parametrize("everywhere", [True, False], ids=["seeded_alike", "seeded_on_rank_0"])
    @pytest.mark.parametrize("model", ["gpt", "buffers"])
    @promise()
    def test_same_seed_same_weights(self, ranks: Ranks, model: str, everywhere: bool) -> None:
        """A seed gives every parameter and buffer the values it has in plain PyTorch, to the bit, at every size.

        The seed is that of rank 0; other ranks may have been given another, or none.

        Usual cause:
            Ranks draw only the numbers of their own shard, the number of a rank goes into the seed, or something
            draws between ``seed_everything`` and the first layer.
        """
        truth = _built_plainly(model)
        for weights in ranks.run(build, model, everywhere):
            oracle.assert_same_weights({name: weights[name] for name in truth}, truth, 0.0)

    @promise()
    def test_dropout_drops_its_share(self, ranks: Ranks) -> None:
        """In training, dropout drops the share it is set to and scales what is left.

        Usual cause:
            Setup leaves the module in evaluation mode, or a generator of the engine's own draws masks that are
            not independent.
        """
        for _, output in ranks.run(drop):
            kept = output != 0
            assert torch.allclose(output[kept], output.new_tensor(1 / (1 - _DROPPED))), "what is kept is not scaled"
            spread = (_DROPPED * (1 - _DROPPED) / output.numel()) ** 0.5
            share = 1 - kept.float().mean().item()
            assert abs(share - _DROPPED) < 5 * spread, f"{share:.3f} of the elements are dropped, not {_DROPPED}"

    @promise(after=("dropout_drops_its_share",))
    def test_dropout_masks_differ_between_data_ranks(self, ranks: Ranks) -> None:
        """Ranks that see different data draw different masks; ranks that see the same data draw the same.

        Usual cause:
            All ranks still have the generator that drew the initial weights; setup must let them part ways.
        """
        _assert_masks_differ(ranks.run(drop))

    @promise(after=("same_seed_same_weights", "dropout_masks_differ_between_data_ranks"))
    def test_seeding_again_keeps_masks_apart(self, ranks: Ranks) -> None:
        """Seeded again in mid-run, data ranks go on to draw different masks, and the same seed draws the same again.

        Usual cause:
            Only setup gives data ranks generators of their own; a later ``seed_everything`` gives all of them one.
        """
        answers = ranks.run(drop_after_seeds)
        for rank, (_, first, again) in enumerate(answers):
            assert torch.equal(first, again), f"rank {rank} draws other masks when the same seed is given again"
        _assert_masks_differ([(data_rank, output) for data_rank, output, _ in answers])

    @promise(after=("same_seed_same_weights",))
    def test_same_seed_same_run(self, ranks: Ranks) -> None:
        """The same seed at the same size gives the same run, bit for bit, dropout included.

        Usual cause:
            A generator is seeded from the clock or from what an earlier run left, or gradients are
            added up in the order they happen to arrive.
        """
        for rank, (first, second) in enumerate(ranks.run(run_twice)):
            assert first.losses == second.losses, f"rank {rank}: the losses {first.losses} became {second.losses}"
            oracle.assert_same_weights(second.weights, first.weights, 0.0)


def _assert_masks_differ(answers: Sequence[tuple[int, torch.Tensor]]) -> None:
    for rank, (data_rank, output) in enumerate(answers):
        for other, (its_data_rank, its_output) in enumerate(answers[:rank]):
            same = torch.equal(output, its_output)
            assert same == (data_rank == its_data_rank), (
                f"ranks {other} and {rank}, data ranks {its_data_rank} and {data_rank}, draw "
                f"{'the same mask' if same else 'different masks'}"
            )


@functools.cache
def _built_plainly(model: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(_SEED)
    return _make(model).state_dict()


def _make(model: str) -> nn.Module:
    made = models.make(model)
    nn.Linear(2, 2)  # nobody keeps what is drawn last, as where an output layer is tied once it was made
    return made


def build(subject: Subject, model: str, everywhere: bool) -> dict[str, torch.Tensor]:
    """Build a model from the seed, everywhere or on rank 0, and return all values; tied ones stand under each name."""
    with subject.strategy() as strategy:
        seed = _SEED if everywhere else _SEED + strategy.global_rank
        ready, _ = set_up(strategy, functools.partial(_make, model), "sgd", seed=seed)
        unwrapped = strategy.unwrap(ready)
        names = {id(tensor): name for name, tensor in unwrapped.named_parameters()}
        weights = whole_weights(strategy, ready)
        aliases = unwrapped.named_parameters(remove_duplicate=False)
        return {**weights, **{alias: weights[names[id(tensor)]] for alias, tensor in aliases}}


class _Dropping(nn.Module):
    """Drops elements of what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(_COLUMNS))
        self.dropout = nn.Dropout(_DROPPED)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        dropped: torch.Tensor = self.dropout(inputs * self.scale)
        return dropped


def drop(subject: Subject) -> tuple[int, torch.Tensor]:
    """Return the data rank, and what dropout leaves of ones."""
    with subject.strategy() as strategy:
        return strategy.distributed_sampler_kwargs["rank"], _dropped(strategy, _set_up(strategy))


def drop_after_seeds(subject: Subject) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the data rank, and what dropout leaves of ones after each of two seeds in mid-run, which are the same."""
    with subject.strategy() as strategy:
        model = _set_up(strategy)
        outputs = []
        for _ in range(2):
            _dropped(strategy, model)
            strategy.seed_everything(_SEED)
            outputs.append(_dropped(strategy, model))
        first, again = outputs
        return strategy.distributed_sampler_kwargs["rank"], first, again


def _set_up(strategy: Strategy) -> nn.Module:
    return set_up(strategy, _Dropping, lambda module: torch.optim.SGD(module.parameters(), lr=0.1))[0]


def _dropped(strategy: Strategy, model: nn.Module) -> torch.Tensor:
    output: torch.Tensor = model(strategy.batch_to_device(torch.ones(_ROWS, _COLUMNS)))
    return output.detach().cpu()


class _Noisy(nn.Module):
    """A regression with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.second = nn.Linear(32, 3)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        hidden = functional.dropout(torch.tanh(self.first(inputs)), 0.5, self.training)
        return functional.mse_loss(self.second(hidden), targets)


def run_twice(subject: Subject) -> tuple[Run, Run]:
    """Train twice from the same seed."""
    first, second = (train(subject, _Noisy, "adamw", _STEPS) for _ in range(2))
    return first, second
