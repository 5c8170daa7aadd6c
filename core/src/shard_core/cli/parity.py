"""``shard parity``: whether a strategy trains the user's own model as plain PyTorch does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from shard_core import plugins
from shard_core.cli.own_model import make_recipe, other_output_on_stderr, takes_a_model, unusable
from shard_core.testing.option_arguments import values_of

if TYPE_CHECKING:
    from shard_core.parity.check import Result
    from shard_core.parity.comparison import Row
    from shard_core.strategy import Strategy

_DIFFERS = 1
_RANDOM = (
    "--train-mode: dropout draws other masks on every rank and batch normalisation sees a part of the batch, so a "
    "model that has them differs under every strategy."
)


@click.command(name="parity")
@takes_a_model
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True, help="Steps on the one batch.")
@click.option("--optimizer", default="sgd", show_default=True, help="sgd, adamw, or SCRIPT.PY:FUNCTION of the model.")
@click.option("--tolerance", type=click.FloatRange(min=0.0), help="Relative difference allowed; else by precision.")
@click.option("--train-mode", is_flag=True, help="Leave the model in training mode: with dropout, say.")
@click.pass_context
def command(context: click.Context, /, strategy: str, assignments: Sequence[tuple[str, str]], **args: Any) -> None:
    """Train your own model in plain PyTorch and under a strategy, and name the first parameter that differs.

    MAKE_MODEL returns the model, or the model and a batch: a tensor, a tuple of arguments or a dict of keyword
    arguments, whose tensors begin with the samples. The exit status is 0 if both are the same, 1 if they differ, 2 if
    nothing could be compared.
    """
    with other_output_on_stderr(args["as_json"]), unusable("nothing could be compared"):
        result = _check(strategy, values_of(assignments, plugins.find(strategy).options), args)
    if args["as_json"]:
        click.echo(json.dumps(_card(strategy, args, result), indent=2))
    else:
        _print(strategy, args, result)
    context.exit(0 if result.verdict.same else _DIFFERS)


def _check(name: str, options: dict[str, Any], args: dict[str, Any]) -> Result:
    from shard_core.precision.policies import resolve_name
    from shard_core.selection import get_strategy

    args["precision"] = resolve_name(args["precision"])
    run = {key: args[key] for key in ("devices", "accelerator", "precision")}

    def make_strategy() -> Strategy:
        return get_strategy(name, **run, **options)

    make_strategy()  # options are checked before the user's script is imported
    import torch

    from shard_core.parity.check import check

    with tempfile.TemporaryDirectory(prefix="shard-parity-") as folder, _status() as announce:
        return check(
            make_recipe(folder, args, steps=args["steps"], train_mode=args["train_mode"]),
            make_strategy,
            precision=args["precision"],
            device=torch.device("cuda" if args["accelerator"] in ("cuda", "gpu") else "cpu"),
            tolerance=args["tolerance"],
            announce=announce,
        )


@contextlib.contextmanager
def _status() -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    console = Console(stderr=True)
    with console.status("") as status:
        yield lambda what: status.update(f"running {what}")


def _card(strategy: str, args: dict[str, Any], result: Result) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "devices": args["devices"],
        "data_ranks": result.data_ranks,
        "precision": args["precision"],
        "same": result.verdict.same,
        "first": result.verdict.first,
        "says": result.verdict.says,
        "rows": [_row(row) for row in result.rows],
    }


def _row(row: Row) -> dict[str, Any]:
    """Convert a row to JSON, which has no word for infinity."""
    fields = {**dataclasses.asdict(row), "same": row.same}
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in fields.items()
    }


def _print(strategy: str, args: dict[str, Any], result: Result) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    table = Table(Column("", no_wrap=True), "plain", strategy, "difference", "allowed", "", box=box.SIMPLE_HEAD)
    for row in result.rows:
        numbers = ("" if number is None else f"{number:.7g}" for number in (row.plain, row.strategy))
        verdict = Text("same", "green") if row.same else Text("differs", "bold red")
        table.add_row(row.what, *numbers, f"{row.difference:.1e}", f"{row.allowed:.1e}", verdict)
    console = Console(highlight=False)
    mode = "training mode" if args["train_mode"] else "eval mode"
    ranks = f"{args['devices']} rank{'s' * (args['devices'] != 1)}"
    console.print(f"{args['make_model']} under {strategy} on {ranks}, {args['precision']}, {mode}", markup=False)
    console.print(table)
    console.print(Text(result.verdict.says))
    if args["train_mode"]:
        console.print(_RANDOM, markup=False)
