"""After setup a rank holds its shards, and nothing of what the module was before."""

from __future__ import annotations

import gc
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy

WIDTH, LAYERS = 256, 4
SHARE = 0.6  # of the model, on two ranks: a half, and what is small
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp", {}),
    "units": ("fsdp", {"unit_bytes": 1}),
    "offloaded": ("fsdp_cpu_offload", {}),
    "split": ("tp", {"tensor_parallel_size": 2, "plan": {"*": "colwise_gather_output"}}),
}


def allocated() -> int:
    """Add up the bytes behind all tensors that are alive."""
    gc.collect()
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is deprecated is looked at, too
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor) and type(each) in (torch.Tensor, nn.Parameter):
                storage = each.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def settled(limit: float, *, patience_s: float = 10.0) -> int:
    """Return what is allocated as soon as that is no more than `limit`, or after `patience_s`.

    gloo's own threads drop what a collective has sent some milliseconds after its end.
    """
    end = time.monotonic() + patience_s
    while (found := allocated()) > limit and time.monotonic() < end:
        time.sleep(0.01)
    return found


def hold(layout: str) -> tuple[int, int]:
    """Return the bytes of the model, and those of all tensors after setup."""
    name, options = LAYOUTS[layout]
    before = allocated()
    with get_strategy(name, accelerator="cpu", **options) as strategy:
        model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        whole = allocated() - before
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        held = strategy.setup_module_and_optimizers(model, [optimizer])
        del model, optimizer
        left = settled(before + SHARE * whole) - before
        del held
        return whole, left


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_rank_holds_what_was_whole_before_setup(worlds: Any, layout: str) -> None:
    for whole, left in worlds(2).run(hold, layout):
        assert left <= SHARE * whole
