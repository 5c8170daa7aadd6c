"""``shard tune``: which of a strategy's settings train the user's own model fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from shard_core import plugins
from shard_core.cli.own_model import make_recipe, other_output_on_stderr, takes_a_model, unusable
from shard_core.testing.option_arguments import values_of
from shard_core.tuning.verdict import spelled, verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from shard_core.tuning.outcome import Outcome
    from shard_core.tuning.rounds import Rounds
    from shard_core.tuning.search import Result


@click.command(name="tune")
@takes_a_model
@click.option("--optimizer", default="adamw", show_default=True, help="sgd, adamw, or SCRIPT.PY:FUNCTION of the model.")
@click.option(
    "--rounds", type=click.IntRange(min=2), default=5, show_default=True, help="How often each setting takes its turn."
)
@click.option("--steps", type=click.IntRange(min=1), default=4, show_default=True, help="Timed steps in a turn.")
@click.option("--warm-up", type=click.IntRange(min=1), default=2, show_default=True, help="Steps before them.")
def command(strategy: str, assignments: Sequence[tuple[str, str]], **args: Any) -> None:
    """Train your own model for a few steps under settings of a strategy, and name the fastest.

    MAKE_MODEL returns the model, or the model and a batch: a tensor, a tuple of arguments or a dict of keyword
    arguments, whose tensors begin with the samples. What --option says is kept. The exit status is 0, or 2 if nothing
    could be measured.
    """
    with other_output_on_stderr(args["as_json"]), unusable("nothing could be measured"):
        options = values_of(assignments, plugins.find(strategy).options)
        result = _tune(strategy, options, args)
    args = {**args, "strategy": strategy, "options": options}
    if args["as_json"]:
        click.echo(json.dumps(_card(args, result), indent=2))
    else:
        _print(args, result)


def _tune(name: str, options: Mapping[str, Any], args: dict[str, Any]) -> Result:
    from shard_core.precision.policies import resolve_name
    from shard_core.selection import get_strategy

    args["precision"] = resolve_name(args["precision"])
    run = {key: args[key] for key in ("devices", "accelerator", "precision")}
    get_strategy(name, **run, **options)  # options are checked before the user's script is imported

    from shard_core.tuning.experiment import Experiment
    from shard_core.tuning.rounds import Rounds
    from shard_core.tuning.search import search

    with tempfile.TemporaryDirectory(prefix="shard-tune-") as folder:
        recipe = make_recipe(folder, args, rate=1e-3, train_mode=True)
        experiment = Experiment(
            recipe=recipe, strategy=name, run=run, options=options, warm_up=args["warm_up"], steps=args["steps"]
        )
        rounds = Rounds(experiment, times=args["rounds"])
        with _bar(rounds):
            return search(experiment, rounds, recipe.prepare())


@contextlib.contextmanager
def _bar(rounds: Rounds) -> Iterator[None]:
    """Show how far rounds have come, where somebody looks."""
    from rich.console import Console
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    bar = Progress(TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
    task = bar.add_task("", total=None)

    def look() -> RenderableType:
        bar.update(task, completed=rounds.done, total=rounds.planned or None)
        return bar

    with (
        Live(get_renderable=look, console=console, transient=True) if console.is_terminal else contextlib.nullcontext()
    ):
        yield


def _card(args: Mapping[str, Any], result: Result) -> dict[str, Any]:
    return {
        **{key: args[key] for key in ("strategy", "devices", "precision", "options", "rounds", "steps", "warm_up")},
        "best": None if result.best is None else result.best.setting,
        "says": _sentence(args, result),
        "rows": [_row(row) for row in result.rows],
    }


def _row(row: Outcome) -> dict[str, Any]:
    """Convert a row to JSON, which has no word for infinity."""
    fields = {**dataclasses.asdict(row), "is_faster": row.is_faster}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()
    }


def _sentence(args: Mapping[str, Any], result: Result) -> str:
    base, where = _base(args), _where(args)
    if len(result.rows) == 1:
        return f"Strategy {args['strategy']!r} names no setting worth trying besides {base}, for this model{where}."
    return verdict(result, base)


def _print(args: Mapping[str, Any], result: Result) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(f"{args['make_model']} under {args['strategy']}{_where(args)}, {args['precision']}", markup=False)
    console.print(_table(args, result))
    console.print(Text(_sentence(args, result)))
    if result.best is not None:
        options = {**args["options"], **result.best.setting}
        shown = {"precision": args["precision"], **options} if args["precision"] != "32-true" else options
        console.print(Text(f"\nget_strategy({args['strategy']!r}, {spelled(shown)})", "bold"), soft_wrap=True)
        typed = (shlex.quote(f"{name}={value}") for name, value in options.items())
        console.print(Text(" ".join(f"--option {each}" for each in typed)), soft_wrap=True)


def _table(args: Mapping[str, Any], result: Result) -> Table:
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    columns = (Column(heading, justify="right") for heading in ("ms per step", "ratio", "peak memory"))
    table = Table(Column("setting", overflow="fold"), *columns, "", box=box.SIMPLE_HEAD)
    for row in result.rows:
        name = spelled(row.setting) or _base(args)
        if row.problem is not None:
            table.add_row(name, "", "", "", Text(row.problem, "red"))
            continue
        verdict = Text("fastest", "green") if result.best and row.setting == result.best.setting else Text("")
        if not row.same_loss:
            verdict = Text(f"trains differently: losses differ by {row.loss_difference:.1e}", "red")
        ratio = f"{row.ratio:.2f} ± {row.noise / 2:.2f}" if row.setting else "1"
        table.add_row(name, f"{row.milliseconds:.1f}", ratio, _size(row.peak_bytes), verdict)
    return table


def _where(args: Mapping[str, Any]) -> str:
    return f" on {args['devices']} rank{'s' * (args['devices'] != 1)}"


def _base(args: Mapping[str, Any]) -> str:
    return "what you gave" if args["options"] else "the defaults"


def _size(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:.1f} MiB"
