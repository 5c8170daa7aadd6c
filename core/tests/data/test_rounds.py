"""What ranks gather for metrics is what one process would have computed: against plain lists, in Accelerate's grid."""

import itertools
from typing import Any

import pytest
import torch
from loaders import Lengths, Stream, with_sampler
from torch.utils.data import DataLoader

from shard_core import get_strategy
from shard_core.errors import CollectiveError

#: Every uneven end there is at so many ranks: as Accelerate's own test of gather_for_metrics has it.
LENGTHS, BATCHES = range(1, 18), range(1, 5)


def evaluated(grid: list[tuple[int, int, bool]]) -> list[tuple[list[int], list[str], list[int]]]:
    """Evaluate once with each loader: tensors, objects, and how many of each came at a time."""
    with get_strategy("ddp") as strategy:
        answers = []
        for length, batch, split in grid:
            loader = strategy.process_dataloader(DataLoader(range(length), batch_size=batch), split_batches=split)
            numbers, texts, sizes = [], [], []
            for samples in loader:
                got = strategy.gather_for_metrics({"of": (samples * 2,), "as": [f"{n}" for n in samples.tolist()]})
                numbers += got["of"][0].tolist()
                texts += got["as"]
                sizes.append(len(got["as"]))
            answers.append((numbers, texts, sizes))
        return answers


@pytest.mark.parametrize("split", [False, True], ids=["each rank's batch", "split_batches"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_sample_counts_once_and_in_order(worlds: Any, size: int, split: bool) -> None:
    grid = [(n, batch * size if split else batch, split) for n, batch in itertools.product(LENGTHS, BATCHES)]
    for answers in [evaluated(grid)] if size == 1 else worlds(size).run(evaluated, grid):
        for (length, batch, _), (numbers, texts, sizes) in zip(grid, answers, strict=True):
            together = batch if split else batch * size
            assert numbers == [2 * n for n in range(length)], (length, batch)
            assert texts == [f"{n}" for n in range(length)], (length, batch)
            assert sizes == [min(together, length - begin) for begin in range(0, length, together)], (length, batch)


def evaluated_with(make: Any, *args: Any, **options: Any) -> list[Any]:
    with get_strategy("ddp") as strategy:
        loader = strategy.process_dataloader(make(*args, **options))
        return [strategy.gather_for_metrics(batch).tolist() for batch in loader]


def own_batches() -> DataLoader[int]:
    return DataLoader(range(9), batch_sampler=Lengths())


def streamed(length: int, batch: int) -> DataLoader[int]:
    return DataLoader(Stream(length), batch_size=batch)


def one_by_one(length: int) -> DataLoader[int]:
    return DataLoader(torch.arange(length), batch_size=None)


def dropping(length: int) -> DataLoader[int]:
    return DataLoader(range(length), batch_size=2, drop_last=True)


@pytest.mark.parametrize(
    ("make", "args", "wanted"),
    [
        (own_batches, (), [[0, 1, 2], [3, 4, 5, 6], [7, 8]]),
        (streamed, (11, 3), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]),
        (streamed, (8, 3), [[0, 1, 2, 3, 4, 5]]),  # a round that is not complete is dealt to nobody
        (one_by_one, (3,), [[0, 1], [2]]),
        (dropping, (11,), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (with_sampler, (5, "own"), [[4, 3], [2, 1], [0]]),
    ],
    ids=["own batches", "a stream", "a cut stream", "samples alone", "drop_last", "own sampler"],
)
def test_what_is_dealt_in_other_ways(worlds: Any, make: Any, args: tuple[Any, ...], wanted: list[list[int]]) -> None:
    for got in worlds(2).run(evaluated_with, make, *args):
        assert got == wanted


def evaluated_inside() -> tuple[list[int], list[int], list[int], str]:
    """Evaluate in the middle of an epoch and between its end's batches, leaving one evaluation early."""
    with get_strategy("ddp") as strategy:
        training = strategy.process_dataloader(DataLoader(range(5), batch_size=1))
        validation = strategy.process_dataloader(DataLoader(range(10, 17), batch_size=2))
        seen: list[int] = []
        checked: list[int] = []
        first: list[int] = []
        for batch in training:
            for inner in validation:
                checked += strategy.gather_for_metrics(inner).tolist()
            for inner in validation:
                first += strategy.gather_for_metrics(inner).tolist()
                break
            validation.set_epoch(0)
            seen += strategy.gather_for_metrics(batch).tolist()
        try:
            strategy.gather_for_metrics(batch)
        except CollectiveError as error:
            return seen, checked, first, str(error)
        return seen, checked, first, ""


def test_evaluation_inside_training(worlds: Any) -> None:
    for seen, checked, _, refusal in worlds(2).run(evaluated_inside):
        assert seen == [0, 1, 2, 3, 4]
        assert checked[:7] == [10, 11, 12, 13, 14, 15, 16]
        assert "no loader of process_dataloader was iterated over" in refusal


def evaluated_side_by_side() -> list[list[int]]:
    with get_strategy("ddp") as strategy:
        loaders = [strategy.process_dataloader(DataLoader(range(n), batch_size=2)) for n in (5, 6)]
        found: list[list[int]] = [[], []]
        for batches in zip(*loaders, strict=True):
            for place, (loader, batch) in enumerate(zip(loaders, batches, strict=True)):
                found[place] += strategy.gather_for_metrics(batch, loader=loader).tolist()
        return found


def test_loaders_side_by_side_are_told_apart(worlds: Any) -> None:
    for found in worlds(2).run(evaluated_side_by_side):
        assert found == [[*range(5)], [*range(6)]]


def refusals() -> dict[str, str]:
    with get_strategy("ddp") as strategy:
        rank = strategy.global_rank
        loader = strategy.process_dataloader(DataLoader(range(4), batch_size=2))
        asked = {
            "a loss": torch.tensor(0.5),
            "two rows a sample": {"x": torch.ones(4, 3)},
            "a number": {"loss": 0.5},
            "a list too long": ["a"] * 3,
            "only rank 1 is wrong": torch.ones(2 + rank),
            "other lengths": torch.ones(2, 3 + rank),
            "other dtypes": {"x": torch.ones(2, dtype=torch.float64 if rank else torch.float32)},
            "other keys": {"x" if rank else "y": torch.ones(2)},
            "an object of a class": [strategy, None],
        }
        found = {}
        for _ in loader:
            for what, data in asked.items():
                with pytest.raises(CollectiveError) as error:
                    strategy.gather_for_metrics(data)
                found[what] = str(error.value)
            assert strategy.gather_for_metrics([{"boxes": torch.ones(rank)}] * 2, use_gather_object=True)[1][
                "boxes"
            ].tolist() == [1.0]
        return found


def test_what_cannot_be_gathered_is_refused_alike(worlds: Any) -> None:
    first, second = worlds(2).run(refusals)
    assert first == second
    words = {
        "a loss": "a tensor of shape (), and the batch drawn last has 2; give tensors whose first dimension",
        "two rows a sample": "a tensor of shape (4, 3) of 4 samples at ['x'], and the batch drawn last has 2",
        "a number": "an object of type float at ['loss']",
        "a list too long": "a list of 3 samples, and the batch drawn last has 2",
        "only rank 1 is wrong": "a tensor of shape (3,) of 3 samples",
        "other lengths": "data rank 1 has float32 (samples, 4), where data rank 0 has float32 (samples, 3)",
        "other dtypes": "has float64 (samples) at ['x'], where data rank 0 has float32 (samples)",
        "other keys": "has ",
        "an object of a class": "DDPStrategy cannot be sent between ranks",
    }
    for what, sentence in words.items():
        assert sentence in first[what], first[what]
