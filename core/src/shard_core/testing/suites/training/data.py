"""Every sample is seen by one data rank, and all ranks take equally many steps."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from shard_core.testing.rules import promise
from shard_core.testing.suites.suite import Suite

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from shard_core.testing.strategy_under_test import Ranks, Subject

_SAMPLES = 23
"""A prime: it divides neither by the ranks nor by their batches."""

_BATCH = 4
_EPOCHS = 2

_STREAMED = [list(range(start, min(start + _BATCH, 50))) for start in range(0, 50, _BATCH)]
"""The batches of a stream: a prime number, the last of them smaller."""

_EVALUATED = (1, 5, 8, 11)
"""Numbers of samples in evaluations."""

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
        global_batch = _BATCH * replicas
        wanted = _SAMPLES // global_batch * global_batch if drop_last else -(-_SAMPLES // replicas) * replicas
        for epoch in range(_EPOCHS):
            seen = Counter(sample for share in shares.values() for batch in share[epoch] for sample in batch)
            missing = set(range(_SAMPLES)) - set(seen)
            assert seen.total() == wanted, f"{seen.total()} samples are seen in epoch {epoch}, not {wanted}"
            assert len(missing) == max(0, _SAMPLES - wanted), f"nobody sees samples {sorted(missing)} in epoch {epoch}"

    @promise(after=("samples_are_shared_out",))
    def test_streams_are_shared_by_batches(self, ranks: Ranks) -> None:
        """Batch n of a stream that all ranks read goes to data rank n modulo their number, an incomplete round to none.

        Usual cause:
            A stream is passed on as it is, so that every rank trains on all of it; or a share is taken by the rank
            in the world instead of the data rank.
        """
        for rank, (data_rank, replicas, epochs) in enumerate(ranks.run(stream)):
            wanted = _share(_STREAMED, data_rank, replicas)
            assert epochs == [wanted] * _EPOCHS, (
                f"rank {rank}, data rank {data_rank} of {replicas}, gets the batches {epochs} of {_EPOCHS} epochs of a "
                f"stream, not {wanted} of each"
            )

    @promise(after=("streams_are_shared_by_batches", "plain_values_come_back"))
    def test_streams_go_on_at_any_world_size(
        self, ranks: Ranks, ranks_of: Callable[..., Ranks], tmp_path: Path
    ) -> None:
        """A stream with a ``state_dict`` that ranks share goes on at the next unseen batch, on any number of ranks.

        Usual cause:
            The position is a rank's own, or that of batches which were read ahead and given to nobody.
        """
        seen = 2 * ranks.run(saves_stream, tmp_path, 2)[0]
        for size in self.sizes():
            for rank, (data_rank, replicas, (batches,)) in enumerate(ranks_of(size).run(stream, tmp_path)):
                wanted = _share(_STREAMED[seen:], data_rank, replicas)
                assert batches == wanted, (
                    f"saved at {ranks.size} ranks after {seen} batches, the stream goes on at {size} with {batches} on "
                    f"rank {rank}, not with {wanted}"
                )

    @pytest.mark.parametrize("split_batches", [False, True])
    @promise(after=("samples_are_shared_out",))
    def test_metrics_count_every_sample_once(self, ranks: Ranks, split_batches: bool) -> None:
        """What ranks gather for metrics is every sample of the data once and in its order, however uneven its end.

        So it is for tensors and lists, in an evaluation inside training, whose own batch is still known afterwards.

        Usual cause:
            What fills the last round up is counted twice, ranks' batches are joined one after the other though samples
            were dealt out in turn, or the batch is taken for that of another loader.
        """
        for rank, (evaluated, trained) in enumerate(ranks.run(evaluates, split_batches)):
            for length, gathered in evaluated.items():
                wanted = [*range(length)], [f"{sample}" for sample in range(length)]
                assert gathered == wanted, f"rank {rank} has gathered {gathered} of {length} samples, not {wanted}"
            assert trained == [*range(_SAMPLES)], f"rank {rank} has gathered {trained} around an evaluation"


def _share(batches: list[list[int]], data_rank: int, replicas: int) -> list[list[int]]:
    return batches[data_rank : len(batches) // replicas * replicas : replicas]


class _Stream(IterableDataset[int]):
    """Yields everything on every rank, and goes on where it was left."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        for sample in range(self.position, _STREAMED[-1][-1] + 1):
            self.position += 1
            yield sample
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def stream(subject: Subject, path: Path | None = None) -> tuple[int, int, Epochs]:
    """Return the data rank, how many there are, and what comes out of a stream, from a saved position on."""
    with subject.strategy() as strategy:
        loader = strategy.process_dataloader(DataLoader(_Stream(), batch_size=_BATCH))
        if path is not None:
            strategy.load_checkpoint(path, {"data": loader})
        epochs = [[batch.tolist() for batch in loader] for _ in range(_EPOCHS if path is None else 1)]
        data = strategy.distributed_sampler_kwargs
        return data["rank"], data["num_replicas"], epochs


def saves_stream(subject: Subject, path: Path, steps: int) -> int:
    """Save the position in a stream after some steps; return how many data ranks there are."""
    with subject.strategy() as strategy:
        loader = strategy.process_dataloader(DataLoader(_Stream(), batch_size=_BATCH))
        for _ in itertools.islice(loader, steps):
            pass
        strategy.save_checkpoint(path, {"data": loader})
        return strategy.distributed_sampler_kwargs["num_replicas"]


def evaluates(subject: Subject, split_batches: bool) -> tuple[dict[int, tuple[list[int], list[str]]], list[int]]:
    """Gather what comes out of evaluations of different lengths, and out of the training they interrupt."""
    with subject.strategy() as strategy:
        batch = strategy.distributed_sampler_kwargs["num_replicas"] * 2 if split_batches else _BATCH

        def share(length: int) -> Iterable[tuple[torch.Tensor]]:
            plain = DataLoader(TensorDataset(torch.arange(length)), batch)
            return strategy.process_dataloader(plain, split_batches=split_batches)

        evaluated: dict[int, tuple[list[int], list[str]]] = {}
        trained: list[int] = []
        for (samples,) in share(_SAMPLES):
            for length in () if trained else _EVALUATED:
                evaluated[length] = numbers, texts = [], []
                for (inner,) in share(length):
                    results: dict[str, Any] = {"numbers": inner, "texts": [f"{sample}" for sample in inner.tolist()]}
                    gathered = strategy.gather_for_metrics(results)
                    numbers += gathered["numbers"].tolist()
                    texts += gathered["texts"]
            trained += strategy.gather_for_metrics(samples).tolist()
        return evaluated, trained


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
