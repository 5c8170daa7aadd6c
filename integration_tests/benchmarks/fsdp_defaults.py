"""Default settings of ``fsdp`` against the best hand-tuned loop, the loop most people write, and other libraries.

Run it with ``python integration_tests/benchmarks/fsdp_defaults.py``. A search goes through units, resharding, kernel
and prefetching of a hand-written loop on ``fully_shard`` and drops the slower half until three are left; these, the
loop with one unit per block, and each installed library then take turns with ours. Ratios are taken between
neighbours in time, so a machine that slows down slows both; what counts is the largest of ours over the three.
"""

import argparse
import importlib.util
import statistics
from typing import Any

import torch
import torch.distributed as dist
from fsdp_loops import PER_BLOCK, Settings, Tuned, candidates
from library_loops import LIBRARIES
from raw_loops import Batch
from rich.console import Console
from rich.table import Table
from step_overhead import GPT, Ours, batches, timed

from shard_core import get_strategy

FINALISTS = 3
SIZES = {"small": (64, 4), "medium": (256, 6)}


def built(size: tuple[int, int]) -> GPT:
    torch.manual_seed(0)
    return GPT(*size)


def race(loops: dict[Any, Any], data: list[Batch], rounds: int) -> dict[Any, tuple[list[float], float]]:
    """Run loops in turns; return each one's milliseconds per step by round, and its last loss."""
    results: dict[Any, tuple[list[float], float]] = {name: ([], 0.0) for name in loops}
    for number in range(rounds):
        for name in list(loops)[:: 1 if number % 2 == 0 else -1]:
            milliseconds, loss = timed(loops[name], data)
            results[name] = ([*results[name][0], milliseconds], loss)
    return results


def best_by_hand(size: tuple[int, int], data: list[Batch], rounds: int) -> list[Settings]:
    """Search by halving: the slower half drops out, again and again, while the rest run for longer."""
    loops = {settings: Tuned(built(size), settings) for settings in candidates()}
    for loop in loops.values():
        timed(loop, data[:2])
    while len(loops) > FINALISTS:
        results = race(loops, data, rounds)
        # What one rank measures differs a little from rank to rank; all must drop the same.
        medians = {name: statistics.median(times) for name, (times, _) in results.items()}
        kept = sorted(loops, key=medians.__getitem__)[: max(FINALISTS, len(loops) // 2)]
        shared = [kept]
        dist.broadcast_object_list(shared, src=0)
        loops = {name: loops[name] for name in shared[0]}
        rounds += 1
    return list(loops)


def compare(
    strategy: Any, size: tuple[int, int], rounds: int, steps: int, batch: int
) -> list[tuple[str, float, float, float]]:
    """Return per loop: its name, median milliseconds, the median of ours over it, how far the last losses differ."""
    torch.set_num_threads(1)
    data = batches(steps, strategy.distributed_sampler_kwargs["rank"], batch)
    strategy.barrier()
    best = best_by_hand(size, data[:2], rounds=2)
    loops: dict[str, Any] = {"ours": Ours(strategy, *size)}
    loops |= {f"by hand: {settings}": Tuned(built(size), settings) for settings in (*best, PER_BLOCK)}
    loops |= {name: loop(built(size)) for name, loop in LIBRARIES.items() if importlib.util.find_spec(loop.needs)}
    for loop in loops.values():
        timed(loop, data[:3])
    results = race(loops, data, rounds)
    ours, loss = results.pop("ours")
    rows = [("ours", statistics.median(ours), 1.0, 0.0)]
    for name, (times, its_loss) in results.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, times, strict=True))
        rows.append((name, statistics.median(times), ratio, abs(its_loss - loss) / loss))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=2, help="texts per rank and step")
    args = parser.parse_args()
    for size in args.sizes:
        result = get_strategy("fsdp", devices=2).launch(compare, SIZES[size], args.rounds, args.steps, args.batch)
        assert result is not None
        width, layers = SIZES[size]
        title = f"{size}: width {width}, {layers} layers, batch {args.batch}"
        table = Table("loop", "ms", "ours / it", "losses differ by", title=title)
        for name, milliseconds, ratio, apart in result:
            table.add_row(name, f"{milliseconds:.1f}", f"{ratio:.3f}", f"{apart:.1e}")
        Console().print(table)


if __name__ == "__main__":
    main()
