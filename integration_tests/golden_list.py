"""The golden checkpoints: which there are, and what wrote each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shard_core import PrecisionPolicy

FOLDER = Path(__file__).with_name("golden")
#: The folder of a run: the step that was saved last does not come last by name.
RUN, RUN_STEPS = FOLDER / "run", (9, 10)

_BFLOAT16_BUFFERS = PrecisionPolicy(
    name="float32 beside bfloat16 buffers",
    parameter="float32",
    compute="float32",
    reduce="float32",
    accumulate="float32",
    optimizer="float32",
    buffer="bfloat16",
)
#: Compiling for speed takes longer than what is compiled here ever runs.
_HASTY = {"XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Golden:
    """What wrote a checkpoint.

    Attributes:
        strategy: The strategy's name.
        size: How many ranks, or devices, it was spread over.
        form: ``"sharded"`` or ``"full"``.
        precision: The precision's name.
        options: Further arguments of ``get_strategy``.
        replaces: Whether another checkpoint stood there, and training went on while this one was written.
        streams: Whether it holds the position of a stream, good for this number of ranks alone, and every dtype.
        data_ranks: The ranks' places among those that see different data.
    """

    strategy: str
    size: int
    form: str
    precision: str = "32-true"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    replaces: bool = False
    streams: bool = False
    data_ranks: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Return the folder it stands in."""
        return f"{self.strategy}-{self.form}-{self.precision}"

    @property
    def path(self) -> Path:
        """Return its path."""
        return FOLDER / self.name

    @property
    def ranks(self) -> int:
        """Return how many processes wrote it."""
        return 1 if self.strategy == "xla_spmd" else self.size

    @property
    def rank_places(self) -> tuple[int, ...]:
        """Return the place of each of these processes among those that saw different data."""
        return self.data_ranks or tuple(range(self.ranks))

    @property
    def environment(self) -> Mapping[str, str]:
        """Return the environment variables that these were started with."""
        if self.strategy == "xla_spmd":
            return {**_HASTY, "CPU_NUM_DEVICES": str(self.size), "XLA_USE_SPMD": "1"}
        return _HASTY if self.strategy.startswith("xla") else {}

    @property
    def freezes(self) -> bool:
        """Return whether its model has a frozen layer; one in bfloat16 beside float32 copies only DeepSpeed reads."""
        return not isinstance(self.stored, PrecisionPolicy)

    @property
    def stored(self) -> str | PrecisionPolicy:
        """Return the precision of a strategy that keeps everything in the dtypes that stand in the files."""
        if self.strategy.startswith("deepspeed") and self.precision == "bf16-true":
            return _BFLOAT16_BUFFERS  # ZeRO steps float32 copies, and these are what is stored
        return self.precision


_STAGE_3 = {"param_persistence_threshold": 0}
_PLAN = {"expand": "colwise", "contract": "rowwise"}
_TP = {"tensor_parallel_size": 2, "plan": _PLAN}
_XLA = {"accelerator": "xla"}
#: Every engine in both forms; every precision under one strategy with whole copies and under one that shards, and
#: those of DeepSpeed and XLA besides. ``fsdp_cpu_offload`` writes what ``fsdp`` writes.
GOLDENS = [
    Golden(strategy="single", size=1, form="sharded"),
    Golden(strategy="single", size=1, form="full", precision="bf16-true"),
    Golden(strategy="single", size=1, form="sharded", precision="16-mixed"),
    Golden(strategy="single", size=1, form="full", precision="64-true"),
    Golden(strategy="ddp", size=2, form="sharded", precision="16-true"),
    Golden(strategy="ddp", size=2, form="full", precision="bf16-mixed"),
    Golden(strategy="fsdp", size=2, form="sharded", streams=True),
    Golden(strategy="fsdp", size=2, form="sharded", precision="bf16-true", replaces=True),
    Golden(strategy="fsdp", size=2, form="full", precision="16-mixed"),
    Golden(strategy="hsdp", size=4, form="sharded", precision="64-true", options={"device_mesh": (2, 2)}),
    Golden(strategy="hsdp", size=2, form="full", options={"device_mesh": (2, 1)}),
    Golden(strategy="tp", size=4, form="sharded", precision="bf16-mixed", options=_TP, data_ranks=(0, 0, 1, 1)),
    Golden(strategy="tp", size=2, form="full", precision="16-true", options=_TP, data_ranks=(0, 0)),
    Golden(strategy="deepspeed_stage_1", size=2, form="sharded", precision="bf16-true"),
    Golden(strategy="deepspeed_stage_2", size=2, form="full", precision="bf16-mixed"),
    Golden(strategy="deepspeed_stage_3", size=2, form="sharded", options=_STAGE_3),
    Golden(strategy="deepspeed_stage_3", size=2, form="full", precision="bf16-true", options=_STAGE_3),
    Golden(strategy="xla_fsdp", size=2, form="sharded", options={**_XLA, "collectives": "host"}),
    Golden(strategy="xla_fsdp", size=2, form="full", precision="bf16-mixed", options={**_XLA, "collectives": "host"}),
    Golden(strategy="xla_spmd", size=4, form="sharded", precision="bf16-true", options=_XLA),
    Golden(strategy="xla_spmd", size=4, form="full", options=_XLA),
]
