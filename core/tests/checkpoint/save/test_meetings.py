"""How often the ranks meet in a save and in a load: each time, all wait for the slowest."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.checkpoint.async_io import AsyncCheckpointIO
from shard_core.checkpoint.interface import SaveHandle
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.collectives.store_exchange import StoreExchange
from shard_core.testing.training import set_up

#: What ranks do together, by where; a side channel does all of it with gathers.
_MEETINGS = {
    ProcessGroupCollectives: ("barrier", "gather_objects", "broadcast_object", "any_true", "all_reduce", "all_gather"),
    StoreExchange: ("gather_objects",),
}
#: ``barrier``, which names the ranks that do not come, and then what the ranks agree on, write and publish.
SAVE = {"barrier": 1, "gather_objects": 3}
#: Agree, see whether there is room, copy; then in the background: stage and make the folder, write, publish.
ASYNC_SAVE = {"barrier": 1, "gather_objects": 3, "behind": 3}
#: Agree, find the manifest, send it, compare everything with it, and fill.
LOAD = {"barrier": 1, "gather_objects": 4, "broadcast_object": 1}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count this process's meetings with others."""
    count: Counter[str] = Counter()
    inside = threading.local()

    def counting(name: str, meet: Callable[..., Any]) -> Callable[..., Any]:
        def meets(*args: Any, **kwargs: Any) -> Any:
            outermost, inside.one = not getattr(inside, "one", False), True
            count[name] += outermost
            try:
                return meet(*args, **kwargs)
            finally:
                inside.one = not outermost

        return meets

    with pytest.MonkeyPatch.context() as patch:
        for kind, names in _MEETINGS.items():
            for name in names:
                called = "behind" if kind is StoreExchange else name
                patch.setattr(kind, name, counting(called, getattr(kind, name)))
        yield count


class Loader:
    """Something of a user's with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state == {"position": 3}


def ready(strategy: Any, optimizer: str) -> dict[str, Any]:
    makers = {
        "sgd": lambda module: torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        "adamw": lambda module: torch.optim.AdamW(module.parameters()),
    }
    model, stepped = set_up(strategy, lambda: nn.Linear(4, 3), makers[optimizer])
    strategy.backward(model(torch.ones(2, 4)).sum(), model)
    strategy.optimizer_step(stepped)
    return {"model": model, "optimizer": stepped, "loader": Loader(), "step": 1}


def saves_and_loads(folder: Path, optimizer: str) -> dict[str, dict[str, int]]:
    """Count the meetings of each of several saves, first ones and replacing ones, and of loads."""
    found = {}

    def count(what: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with counted() as meetings:
            handle = call(*args, **kwargs)
            if isinstance(handle, SaveHandle):
                handle.wait()
        found[what] = dict(meetings)

    with get_strategy("ddp") as strategy:
        state = ready(strategy, optimizer)
        save, load = strategy.save_checkpoint, strategy.load_checkpoint
        for form in ("sharded", "full"):
            for kind in ("first", "replacing"):
                count(f"{kind} {form}", save, folder / form, state, state_dict_type=form)
                path = folder / f"async-{form}"
                count(f"{kind} async {form}", save, path, state, state_dict_type=form, blocking=False)
        count("load", load, folder / "sharded", state)
        count("load of values", load, folder / "full")
        strategy.checkpoint_io = AsyncCheckpointIO()
        count("async by default", save, folder / "default", state)
        count("not async", save, folder / "default", state, blocking=True)
    return found


@pytest.mark.parametrize(("size", "optimizer"), [(2, "sgd"), (3, "adamw")])
def test_a_save_meets_the_other_ranks_no_more_often_than_it_must(
    worlds: Any, tmp_path: Path, size: int, optimizer: str
) -> None:
    for found in worlds(size).run(saves_and_loads, tmp_path, optimizer):
        assert len(found) == 12
        for what, meetings in found.items():
            wanted = LOAD if "load" in what else ASYNC_SAVE if "async" in what.removeprefix("not async") else SAVE
            assert meetings == wanted, what


def keys_after_saves(folder: Path) -> list[int]:
    """Count the store's keys after a few saves and loads, and after more."""
    counts, done = [], 0
    with get_strategy("ddp") as strategy:
        state = ready(strategy, "sgd")
        for wanted in (3, 30):
            for number in range(done, wanted):
                strategy.save_checkpoint(folder / "blocking", state)
                strategy.save_checkpoint(folder / "async", state, blocking=False)
                strategy.load_checkpoint(folder / ("async" if number % 2 else "blocking"), state)
            done = wanted
            strategy.collectives.gather_objects(None)  # over the group, while nobody uses the store
            counts.append(strategy.collectives._store.num_keys())
            strategy.collectives.gather_objects(None)
    return counts


def test_the_store_holds_no_more_keys_after_many_saves(worlds: Any, tmp_path: Path) -> None:
    for few, many in worlds(2).run(keys_after_saves, tmp_path):
        assert few == many
