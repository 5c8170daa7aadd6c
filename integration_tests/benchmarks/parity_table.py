"""How far each strategy ends from plain PyTorch: the table of docs/reference/parity.md.

Run it with ``python integration_tests/benchmarks/parity_table.py``; it prints the table and exits with 1 if a bound is
broken. ``--merge`` writes the rows into the page as well. Rows of strategies that are not judged stay as they are, so
that environments which cannot share a torch fill one table, one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

import torch  # noqa: E402 - after the path of what it is imported beside
from parity_runs import MODELS, OPTIMIZERS, train_plainly, train_under  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402

from shard_core import plugins  # noqa: E402
from shard_core.testing.oracle import Distance, Trajectory, distance  # noqa: E402
from shard_core.testing.processes.world import World  # noqa: E402

if TYPE_CHECKING:
    from shard_core.plugins import StrategyInfo

PAGE = HERE.parents[2] / "docs" / "reference" / "parity.md"
STEPS = 20
BOUNDS = Distance(loss=1e-6, norm=2e-6, weights=1e-5)
HEADER = ("strategy", "ranks", *MODELS.values(), "with")
LIBRARIES = ("torch", "transformers", "deepspeed", "torch_xla")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where a strategy is judged: one row of the table.

    Attributes:
        ranks: How many.
        shape: What else there is to say of them.
        options: Those of the strategy.
        environment: What the processes find in theirs.
    """

    ranks: int = 2
    shape: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)


#: Strategies that are not simply judged on two ranks, without options. Small models are split as large ones would be.
PLACES: Mapping[str, Sequence[Place]] = {
    "fsdp": [Place(options={"unit_bytes": 1})],
    "fsdp_cpu_offload": [Place(options={"unit_bytes": 1})],
    "hsdp": [Place(ranks=4, shape="2x2", options={"unit_bytes": 1, "device_mesh": ("auto", 2)})],
    "tp": [
        Place(shape="1x2", options={"tensor_parallel_size": 2, "unit_bytes": 1}),
        Place(ranks=4, shape="2x2", options={"tensor_parallel_size": 2, "unit_bytes": 1}),
    ],
    "deepspeed_stage_3": [Place(options={"param_persistence_threshold": 0})],
    "xla_fsdp": [Place(options={"collectives": "host"})],
    "xla_spmd": [Place(ranks=1, shape="4 devices", environment={"XLA_USE_SPMD": "1", "CPU_NUM_DEVICES": "4"})],
}
#: Options that a strategy needs for a model.
OF_MODELS = {("tp", "gpt"): {"plan": {"blocks.*.expand": "colwise", "blocks.*.contract": "rowwise"}}}
#: Models that a strategy has nothing for, and why.
LEFT_OUT = {("tp", "gpt2"): "no plan"}


def places(info: StrategyInfo) -> Sequence[Place]:
    return PLACES.get(info.name, [Place(ranks=min(2, info.max_ranks or 2))])


def judge(
    info: StrategyInfo, place: Place, truths: Mapping[str, Trajectory], optimizer: str, steps: int
) -> dict[str, Distance | str]:
    """Train every model at one place; give how far each ended from plain PyTorch, or why it was left out."""
    accelerator = "cpu" if "cpu" in info.devices else info.devices[0]
    found: dict[str, Distance | str] = {}
    with World(place.ranks, place.environment) as world:
        for model, truth in truths.items():
            if (info.name, model) in LEFT_OUT:
                found[model] = LEFT_OUT[info.name, model]
                continue
            options = {"accelerator": accelerator, **place.options, **OF_MODELS.get((info.name, model), {})}
            run = world.run(train_under, info.name, options, model, optimizer, steps, timeout=600)[0]
            found[model] = distance(run, truth)
    return found


def broken(found: Mapping[str, Distance | str]) -> list[str]:
    """List the figures beyond their bounds; what is not a number is beyond any."""
    return [
        f"{model}: {field} {figure:.1e}, allowed {bound:.0e}"
        for model, apart in found.items()
        if isinstance(apart, Distance)
        for field, bound in dataclasses.asdict(BOUNDS).items()
        if not (figure := getattr(apart, field)) <= bound
    ]


def row(name: str, place: Place, found: Mapping[str, Distance | str]) -> list[str]:
    ranks = f"{place.ranks} ({place.shape})" if place.shape else str(place.ranks)
    return [f"`{name}`", ranks, *(_cell(found.get(model, "not run")) for model in MODELS), versions()]


def versions() -> str:
    """Return the versions that the figures were made with."""
    there = {each.metadata["Name"].replace("-", "_"): each.version for each in importlib.metadata.distributions()}
    return ", ".join([f"Python {platform.python_version()}", *(f"{n} {there[n]}" for n in LIBRARIES if n in there)])


def merged(page: str, rows: Sequence[Sequence[str]]) -> str:
    """Merge rows into the page's one table, in the place of those of the same strategy and ranks."""
    lines = page.splitlines()
    found = [number for number, line in enumerate(lines) if line.startswith("|")]
    if not found or _cells(lines[found[0]]) != list(HEADER):
        raise SystemExit(f"the page has no table with the columns {', '.join(HEADER)}.")
    kept = {tuple(cells[:2]): cells for cells in (_cells(lines[number]) for number in found[2:])}
    kept |= {tuple(cells[:2]): list(cells) for cells in rows}
    table = [_line(HEADER), _line(["---"] * len(HEADER)), *(_line(kept[key]) for key in sorted(kept))]
    return "\n".join([*lines[: found[0]], *table, *lines[found[-1] + 1 :]]) + "\n"


def _cell(found: Distance | str) -> str:
    return found if isinstance(found, str) else f"{found.loss:.1e} / {found.norm:.1e} / {found.weights:.1e}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    installed = {each.name: each.info for each in plugins.installed() if each.info and not each.problem}
    parser.add_argument("--strategies", nargs="+", choices=installed, default=list(installed), metavar="NAME")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default=OPTIMIZERS[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--merge", action="store_true", help="write the rows into the page")
    parser.add_argument("--page", type=Path, default=PAGE)
    args = parser.parse_args()
    torch.set_num_threads(1)
    console, rows, failures = Console(stderr=True), [], []
    with Progress(console=console) as progress:
        tasks = [(installed[name], place) for name in args.strategies for place in places(installed[name])]
        bar = progress.add_task("plain PyTorch", total=len(tasks))
        truths = {model: train_plainly(model, args.optimizer, args.steps) for model in args.models}
        for info, place in tasks:
            progress.update(bar, description=f"{info.name} on {place.ranks}")
            found = judge(info, place, truths, args.optimizer, args.steps)
            rows.append(row(info.name, place, found))
            print(_line(rows[-1]), flush=True)
            failures += [f"{info.name} on {place.ranks}, {what}" for what in broken(found)]
            progress.advance(bar)
    if args.merge:
        args.page.write_text(merged(args.page.read_text(), rows))
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
