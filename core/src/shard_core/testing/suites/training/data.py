"""Every sample is seen by one data rank, and all ranks take equally many steps."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from shard_core.testing.subject import Ranks, Subject

_SAMPLES = 23
"""A prime: it divides neither by the ranks nor by their batches."""

_BATCH = 4
_EPOCHS = 2

Epochs = list[list[list[int]]]
"""The samples one rank saw, by epoch and step."""


class Data(Suite):
    """Every sample is seen by one data rank, and all ranks take equally many steps."""

    @pytest.mark.parametrize("drop_last", [False, True])
    @promise(after=("same_seed_same_weights",))
    def test_ranks_take_equally_many_steps(self, ranks: Ranks, drop_last: bool) -> None:
        """However many samples there are, every rank gets as many batches, each as large as the others', and no hang.

        Usual cause:
            Samples are dealt out one by one and the last ranks get fewer; or ``len`` counts the batches of one
            process.
        """
        answers = ranks.run(read, drop_last)
        _, replicas, length, first = answers[0]
        whole, rest = divmod(_SAMPLES, _BATCH * replicas)
        steps = whole + bool(rest and not drop_last)
        for rank, (_, _, its_length, epochs) in enumerate(answers):
            taken = [len(epoch) for epoch in epochs]
            assert taken == [steps] * _EPOCHS, f"rank {rank} takes {taken} steps in its epochs, not {steps}"
            assert its_length == length == steps, f"rank {rank} says it has {its_length} batches, and has {steps}"
            sizes, wanted = ([[len(batch) for batch in epoch] for epoch in each] for each in (epochs, first))
            assert sizes == wanted, f"rank {rank} gets batches of {sizes} samples, rank 0 of {wanted}"

    @pytest.mark.parametrize("drop_last", [False, True])
    @promise(after=("ranks_take_equally_many_steps",))
    def test_samples_are_shared_out(self, ranks: Ranks, drop_last: bool) -> None:
        """In each epoch one data rank sees a sample, and no other; only filling up the last batch repeats any.

        With ``drop_last`` an incomplete last batch is left out, and no sample is seen twice.

        Usual cause:
            Every rank reads all of the data, ranks shuffle with different seeds, or a share is taken by the rank
            in the world instead of the data rank.
        """
        answers = ranks.run(read, drop_last)
        replicas = answers[0][1]
        shares: dict[int, Epochs] = {}
        for rank, (data_rank, _, _, epochs) in enumerate(answers):
            assert shares.setdefault(data_rank, epochs) == epochs, (
                f"rank {rank} has data rank {data_rank}, not its data"
            )
        together = _BATCH * replicas
        wanted = _SAMPLES // together * together if drop_last else -(-_SAMPLES // replicas) * replicas
        for epoch in range(_EPOCHS):
            seen = Counter(sample for share in shares.values() for batch in share[epoch] for sample in batch)
            missing = set(range(_SAMPLES)) - set(seen)
            assert seen.total() == wanted, f"{seen.total()} samples are seen in epoch {epoch}, not {wanted}"
            assert len(missing) == max(0, _SAMPLES - wanted), f"nobody sees samples {sorted(missing)} in epoch {epoch}"


def read(subject: Subject, drop_last: bool) -> tuple[int, int, int, Epochs]:
    """Return the data rank, how many there are, how long the loader says it is, and what came out of it."""
    with subject.strategy() as strategy:
        strategy.seed_everything(0)
        dataset = TensorDataset(torch.arange(_SAMPLES))
        plain = DataLoader(dataset, batch_size=_BATCH, shuffle=True, drop_last=drop_last)
        loader = strategy.process_dataloader(plain)
        epochs = [[batch.tolist() for (batch,) in loader] for _ in range(_EPOCHS)]
        data = strategy.distributed_sampler_kwargs
        return data["rank"], data["num_replicas"], len(loader), epochs
