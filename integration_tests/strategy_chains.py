"""Ways through the strategies of all environments, from checkpoint to checkpoint."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import networkx

#: At how many ranks, or devices, each strategy stands; in this order, over and over.
SIZES = {
    "single": (1,),
    "ddp": (2, 3, 4, 1),
    "fsdp": (3, 4, 1, 2),
    "tp": (4, 1, 2, 3),
    "deepspeed_stage_1": (1, 2, 3, 4),
    "deepspeed_stage_2": (2, 3, 4, 1),
    "deepspeed_stage_3": (3, 4, 1, 2),
    "xla_fsdp": (4, 1, 2, 3),
    "xla_spmd": (1, 2, 3, 4),
}

SPLIT = {"blocks.*.expand": "colwise", "blocks.*.contract": "rowwise"}
#: Compiling for speed takes longer than what is compiled here ever runs.
_HASTY = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}


@dataclasses.dataclass(frozen=True)
class Station:
    """A strategy at one size.

    Attributes:
        strategy: Its name.
        size: How many ranks, or devices, it is spread over.
    """

    strategy: str
    size: int

    def __str__(self) -> str:
        return f"{self.strategy} at {self.size}"

    @property
    def ranks(self) -> int:
        """Return how many processes it needs."""
        return 1 if self.strategy == "xla_spmd" else self.size

    @property
    def options(self) -> dict[str, Any]:
        """Return arguments of ``get_strategy`` beside the name; nothing is too small to be sharded."""
        if self.strategy == "tp":
            return {"tensor_parallel_size": 2 if self.size % 2 == 0 else 1, "plan": SPLIT}
        if self.strategy == "deepspeed_stage_3":
            return {"param_persistence_threshold": 0}
        return {"collectives": "host"} if self.strategy == "xla_fsdp" else {}

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment variables that its ranks are started with."""
        if self.strategy == "xla_spmd":
            return {**_HASTY, "CPU_NUM_DEVICES": str(self.size), "XLA_USE_SPMD": "1"}
        return _HASTY if self.strategy.startswith("xla") else {}


def every_ordered_pair() -> list[Station]:
    """Chain every strategy to every strategy, itself included, each way once.

    Where a strategy follows upon itself it keeps its size, so that all can go on bit for bit; whenever it is come
    back to, it has the next of its sizes.
    """
    ways = networkx.complete_graph(list(SIZES), networkx.DiGraph)
    ways.add_edges_from((name, name) for name in SIZES)
    start = next(iter(SIZES))
    sizes = {name: itertools.cycle(each) for name, each in SIZES.items()}
    stations = [Station(start, next(sizes[start]))]
    for before, name in networkx.eulerian_circuit(ways, start):
        stations.append(stations[-1] if name == before else Station(name, next(sizes[name])))
    return stations
