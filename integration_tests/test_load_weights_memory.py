"""What a rank needs to load a large model: no more than its shards, and of the files no more than it holds."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from shard_core import get_strategy

LAYERS, LAYER = 6, 32  # MiB
WHOLE = LAYERS * LAYER
#: What is freed goes back at once, so that only what is held is seen.
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def make() -> torch.nn.Module:
    return torch.nn.Sequential(*(torch.nn.Linear(2048, LAYER * 128, bias=False) for _ in range(LAYERS)))


def write(kind: str, path: Path) -> None:
    with torch.device("meta"):
        empty = make()
    module = empty.to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    if kind == "safetensors":
        save_file(module.state_dict(), path)
    elif kind == "torch":
        torch.save(module.state_dict(), path)
    else:
        dcp.save(dict(module.state_dict()), checkpoint_id=path, no_dist=True)


def most_used(action: Callable[[], Any]) -> tuple[int, int]:
    """Run something; give by how many MiB this process's own memory has grown at most, and that of mapped files."""

    def used() -> tuple[int, int]:
        fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        own, mapped = (int(fields[name].split()[0]) // 1024 for name in ("RssAnon", "RssFile"))
        return own, mapped

    over = threading.Event()
    seen = [used()]

    def watch() -> None:
        while not over.is_set():
            seen.append(used())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        held = action()
        seen.append(used())  # while what it returned is there, however seldom the watcher ran
        del held
    finally:
        over.set()
        thread.join()
    (own, mapped), *_ = seen
    return max(each[0] for each in seen) - own, max(each[1] for each in seen) - mapped


def measure(path: Path) -> tuple[int, int]:
    with get_strategy("fsdp") as strategy:
        with strategy.module_init_context(empty_init=True):
            model = make()
        model = strategy.setup_module(model)
        strategy.load_weights(path, model)
        assert all(bool((parameter == 1).all()) for parameter in model.parameters())
        # Libraries were loaded by now, whose files are mapped too.
        return most_used(lambda: strategy.load_weights(path, model))


def measure_whole(path: Path) -> tuple[int, int]:
    return most_used(lambda: torch.load(path, weights_only=True))


@pytest.mark.parametrize("kind", ["safetensors", "torch", "distributed"])
def test_a_rank_holds_its_share_and_reads_no_more(worlds: Any, tmp_path: Path, kind: str) -> None:
    write(kind, tmp_path / "weights")
    for own, mapped in worlds(2, SETTINGS).run(measure, tmp_path / "weights", timeout=120):
        # Its shards were there before; beside them there is one chunk of a distributed checkpoint, here a layer.
        assert own <= LAYER * 3 // 2
        # A half of each layer, and where the kernel keeps files in large pages, up to two of 2 MiB more.
        assert mapped <= WHOLE * 3 // 4
    if kind == "torch":  # what is seen where a rank does load all
        for own, _ in worlds(2, SETTINGS).run(measure_whole, tmp_path / "weights"):
            assert own > WHOLE * 3 // 4
