"""What our loop costs over a hand-written one: the same model, engine and steps, in rounds that take turns.

Run it with ``python integration_tests/benchmarks/step_overhead.py``; it prints, for each engine that is installed, the
median milliseconds per step of both loops and their ratio. Every round's ratio is taken between neighbours in
time, so a machine that slows down slows both. Of XLA's two engines a process can run one: name it with ``--engines``.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import loops
import raw_loops
import torch
import torch.distributed as dist
from raw_loops import Batch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from shard_core import get_strategy, plugins

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 4, 4, 64, 8


class GPT(nn.Module):
    """Small, so that overhead shows."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(CONTEXT, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=tokens.device)
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """What is compared.

    Attributes:
        strategy: Ours, by name.
        raw: Makes the hand-written loop around a model.
        options: Those of ours.
        devices: How many ranks, where the raw loop works with this many only.
    """

    strategy: str
    raw: Callable[[nn.Module], Any]
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    devices: int | None = None


ENGINES = {
    "ddp": Engine(strategy="ddp", raw=raw_loops.RawDDP),
    "fsdp root only": Engine(strategy="fsdp", raw=raw_loops.RawFSDP),
    "fsdp per block": Engine(strategy="fsdp", raw=raw_loops.RawFSDPPerBlock),
    "tp": Engine(strategy="tp", raw=raw_loops.RawTP, options={"tensor_parallel_size": raw_loops.RawTP.tensor_ranks}),
    "tp unchecked": Engine(
        strategy="tp",
        raw=raw_loops.RawTP,
        options={"tensor_parallel_size": raw_loops.RawTP.tensor_ranks, "check_batches": False},
    ),
    "deepspeed stage 1": Engine(strategy="deepspeed_stage_1", raw=raw_loops.RawDeepSpeed),
    "deepspeed stage 2": Engine(strategy="deepspeed_stage_2", raw=raw_loops.RawDeepSpeedStage2),
    "deepspeed stage 3": Engine(strategy="deepspeed_stage_3", raw=raw_loops.RawDeepSpeedStage3),
    # Upstream's own loop does not run on several CPU processes.
    "xla fsdp, one rank": Engine(strategy="xla_fsdp", raw=raw_loops.RawXLAFSDP, devices=1),
    "xla spmd, two devices": Engine(
        strategy="xla_spmd", raw=raw_loops.RawXLASPMD, options={"virtual_devices": 2}, devices=1
    ),
}


def batches(count: int, rank: int, batch: int = BATCH) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    texts = [torch.randint(256, (batch, CONTEXT + 1), generator=generator) for _ in range(count)]
    return [(text[:, :-1], text[:, 1:]) for text in texts]


class Ours(loops.Ours):
    """Our loop of the model, drawn by all ranks alike."""

    def __init__(self, strategy: Any, *size: int) -> None:
        strategy.seed_everything(0)
        with strategy.module_init_context():
            model = GPT(*size)
        super().__init__(strategy, model, raw_loops.adamw, clip=True)


def timed(loop: Any, data: list[Batch]) -> tuple[float, float]:
    """Run the steps and return the milliseconds per step of the slowest rank, and the last loss."""
    several = dist.is_initialized()
    if several:
        dist.barrier()
    started = time.perf_counter()
    for batch in data:
        loss = loop.step(*batch).item()
    seconds = torch.tensor(time.perf_counter() - started, dtype=torch.float64)
    if several:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item() * 1000 / len(data), loss


def compare(strategy: Any, engine: str, rounds: int, steps: int) -> tuple[float, float, float, float]:
    """Return raw and our median milliseconds per step, the median ratio, and how far the last losses differ."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pair = ENGINES[engine].raw(GPT()), Ours(strategy)
    data = [strategy.batch_to_device(each) for each in batches(steps, strategy.distributed_sampler_kwargs["rank"])]
    losses = [0.0, 0.0]

    def turn(which: int) -> float:
        milliseconds, losses[which] = timed(pair[which], data)
        return milliseconds

    for loop in pair:
        timed(loop, data[:5])
    found = loops.race(functools.partial(turn, 0), functools.partial(turn, 1), rounds)
    return found["raw_ms"], found["ours_ms"], found["ratio"], abs(losses[1] - losses[0]) / losses[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    there = {each.name for each in plugins.installed() if not each.problem}
    found = [name for name, engine in ENGINES.items() if engine.strategy in there]
    parser.add_argument("--engines", nargs="+", choices=found, default=found, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()
    table = Table("engine", "raw ms", "ours ms", "ratio", "losses differ by")
    for engine in args.engines:
        strategy = get_strategy(
            ENGINES[engine].strategy, devices=ENGINES[engine].devices or args.devices, **ENGINES[engine].options
        )
        result = strategy.launch(compare, engine, args.rounds, args.steps)
        assert result is not None
        raw, ours, ratio, apart = result
        table.add_row(engine, f"{raw:.2f}", f"{ours:.2f}", f"{ratio:.3f}", f"{apart:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
