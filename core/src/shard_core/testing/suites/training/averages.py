"""An average of weights is plain PyTorch's, and evaluating with it changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from shard_core.ema import ExponentialMovingAverage
from shard_core.testing import models, oracle
from shard_core.testing.bits import Bits, assert_same_bits
from shard_core.testing.rules import CapabilityRefused, promise
from shard_core.testing.suites.suite import Suite
from shard_core.testing.training import set_up, step, whole_weights

if TYPE_CHECKING:
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject

_STEPS, _BATCH, _DECAY = 3, 12, 0.7


class Averages(Suite):
    """An average of weights is plain PyTorch's, and evaluating with it changes nothing."""

    @pytest.mark.parametrize("model", ["gpt", "frozen", "uneven", "scalar"])
    @promise(after=("trains_like_plain_pytorch", "round_trip_is_bitwise", "ties_stay_tied"), every_size=False)
    def test_averages_are_of_weights(self, ranks: Ranks, tmp_path: Path, model: str) -> None:
        """An exponential moving average is that of ``torch.optim.swa_utils``, whole in evaluation and in a checkpoint.

        Afterwards all weights are bit for bit what they were. A strategy of whose parameters no average can be taken
        refuses to make one.

        Usual cause:
            The engine computes with other tensors than it hands to averages, or does not bring values that were
            written into them to where forwards and other ranks read them.
        """
        truth, loss = _averaged_plainly(model)
        try:
            answers = ranks.run(averages, model, tmp_path / "run")
        except CapabilityRefused:
            return
        for rank, (its_loss, within, before, after, loaded) in enumerate(answers):
            oracle.assert_same_weights({name: within[name] for name in truth}, truth, 1e-5)
            oracle.assert_same_numbers("loss with averages", [its_loss], [loss], 1e-5)
            assert_same_bits(f"after evaluation on rank {rank}", after, before)
            assert_same_bits(f"loaded as weights on rank {rank}", loaded, within)


def averages(subject: Subject, name: str, path: Path) -> tuple[float, Bits, Bits, Bits, Bits]:
    """Train; give the loss with averages, and all weights with them, before, afterwards, and loaded from them."""
    *batches, last = models.batches(name, _STEPS + 1, _BATCH)
    with subject.strategy() as strategy:
        model, optimizer = set_up(strategy, name, "sgd")
        average = ExponentialMovingAverage(strategy, model, _DECAY)
        for batch in batches:
            step(strategy, model, optimizer, batch)
            average.update()
        before = whole_weights(strategy, model)
        with average.applied(), torch.no_grad():
            loss = float(strategy.all_reduce(model(*models.share_of(strategy, last))))
            within = whole_weights(strategy, model)
        after = whole_weights(strategy, model)
        strategy.save_checkpoint(path, {"average": average})
        strategy.load_checkpoint(path, {"average": model})
        return loss, within, before, after, whole_weights(strategy, model)


def _averaged_plainly(name: str) -> tuple[dict[str, torch.Tensor], float]:
    """Train in plain PyTorch; give the averages and the loss with them."""
    *batches, last = models.batches(name, _STEPS + 1, _BATCH)
    torch.manual_seed(0)
    model = models.make(name)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(_DECAY))
    average.update_parameters(model)  # its first only copies; ours begins with a copy
    optimizer: Any = models.make_optimizer("sgd", model)
    for batch in batches:
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    with torch.no_grad():
        loss = average(*last).item()
    return {key: value.detach() for key, value in average.module.named_parameters()}, loss
