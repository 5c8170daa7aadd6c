"""Pairs of runs that save to one path at one time; run as a script, it prints what became of each pair.

Usage: overlapping_saves.py FOLDER PAIRS KIND FORM [STORAGE_OPTIONS]; FOLDER is a path or a URL. A run is two ranks,
processes of their own. KIND is "new" or "existing": whether a checkpoint stands at the path before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from fixtures.single_rank import load
from killed_saves import module_of, values_of
from torch import nn

from shard_core.checkpoint.inspection.verify import verify
from shard_core.checkpoint.retention.run_folder import run_entry
from shard_core.checkpoint.sharded_io import ShardedCheckpointIO
from shard_core.checkpoint.state.tensor_state import TensorState
from shard_core.checkpoint.storage.opening import open_folder
from shard_core.collectives.process_group import ProcessGroupCollectives
from shard_core.errors import CheckpointError

RUNS, RANKS = 2, 2
_SECONDS = 120.0
_MOST_JITTER = 0.02


def _save(coordinator: Any, path: str, value: float, form: str, options: Any) -> None:
    module = module_of(value)
    state = TensorState({"model": module}, {}, rank=coordinator.rank, world_size=RANKS)
    ShardedCheckpointIO().save(
        path,
        state,
        {"value": value, "copy": torch.tensor(value)},
        coordinator=coordinator,
        information={},
        state_dict_type=form,
        storage_options=options,
    )


def _outcome(coordinator: Any, path: str, value: float, form: str, options: Any) -> str:
    try:
        _save(coordinator, path, value, form, options)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run(number: int, rank: int, paths: list[str], meeting: Path, turns: Any, arguments: tuple[str, str, Any]) -> None:
    """Save to each path as one rank of one run, beside the other run; rank 0 writes down what became of each save."""
    kind, form, options = arguments
    store = torch.distributed.FileStore(str(meeting / f"run-{number}"), RANKS)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=_SECONDS)
    )
    collectives = ProcessGroupCollectives()
    collectives.connect(rank, RANKS, torch.device("cpu"))
    outcomes = []
    for place, path in enumerate(paths):
        if kind == "existing" and number == 0:
            _save(collectives, path, 0.0, form, options)
        turns.wait(_SECONDS)
        time.sleep(random.Random(f"{place}-{number}").uniform(0, _MOST_JITTER))
        outcomes.append(_outcome(collectives, path, float(number + 1), form, options))
    if rank == 0:
        (meeting / f"outcomes-{number}").write_text(json.dumps(outcomes))


def _left(path: str, options: Any) -> dict[str, Any]:
    """Load what stands at a path, and check that it is one save's as a whole."""
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    try:
        values = values_of(load(path, module, storage_options=options).values, module)
    except CheckpointError as error:
        return {"broken": f"{type(error).__name__}: {error}"}
    entry = run_entry(open_folder(path, options))
    assert entry is not None
    assert verify(path, storage_options=options).is_fine
    return {"value": values, "leftovers": sorted(entry.leftovers)}


def main(folder: str, pairs: int, kind: str, form: str, options: Any) -> None:
    """Start two runs that save to one path after another, and check each."""
    torch.set_num_threads(1)
    paths = [f"{folder}/pair-{place}/step-1" for place in range(pairs)]
    turns = multiprocessing.Barrier(RUNS * RANKS)
    with tempfile.TemporaryDirectory() as name:
        meeting, children = Path(name), []
        for number in range(RUNS):
            for rank in range(RANKS):
                child = os.fork()
                if child == 0:
                    status = 1
                    try:
                        _run(number, rank, paths, meeting, turns, (kind, form, options))
                        status = 0
                    finally:
                        os._exit(status)
                children.append(child)
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * len(children)
        outcomes = [json.loads((meeting / f"outcomes-{number}").read_text()) for number in range(RUNS)]
    found = [_left(path, options) | {"errors": list(both)} for path, *both in zip(paths, *outcomes, strict=True)]
    print(json.dumps(found))


if __name__ == "__main__":
    main(
        sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4], json.loads(sys.argv[5]) if len(sys.argv) > 5 else None
    )
