"""``shard checkpoint compare``: all in which two checkpoints differ."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import click

from shard_core.cli.checkpoint.arguments import FOUND_WANTING, naming_a_checkpoint, storage_options
from shard_core.cli.checkpoint.figures import number, size
from shard_core.cli.checkpoint.progress import progress

if TYPE_CHECKING:
    from shard_core.checkpoint.inspection.compare import Comparison


@click.command(name="compare")
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0.0),
    metavar="X",
    help="Relative difference of numbers that is allowed; without it they must be the same bits.",
)
@storage_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, /, first: str, second: str, as_json: bool, **args: Any) -> None:
    """List every tensor, optimizer group and value in which the checkpoints FIRST and SECOND differ.

    How they were written makes no difference: form, world size and strategy may be unlike. The exit status is 0 if they
    hold the same, 1 if they differ or one is damaged, 2 if either path is no checkpoint.
    """
    from shard_core.checkpoint.inspection.compare import compare

    with naming_a_checkpoint(), progress("comparing", size) as report:
        comparison = compare(first, second, progress=report, **args)
    if as_json:
        click.echo(json.dumps(_card(comparison), indent=2))
    else:
        _print(comparison)
    context.exit(0 if comparison.same else FOUND_WANTING)


def _card(comparison: Comparison) -> dict[str, Any]:
    card: dict[str, Any] = {**dataclasses.asdict(comparison), "same": comparison.same}
    for difference in card["differences"]:
        for key, value in (difference["elements"] or {}).items():
            # JSON has no word for infinity.
            difference["elements"][key] = value if math.isfinite(value) else None
    return card


def _print(comparison: Comparison) -> None:
    summary = f"{number(comparison.tensors, 'tensor')}, {size(comparison.bytes)}"
    within = "" if comparison.tolerance is None else f" within {comparison.tolerance:g}"
    if comparison.same:
        click.echo(f"{comparison.first} and {comparison.second} hold the same{within} ({summary}).")
        return
    click.echo(f"first:  {comparison.first}")
    click.echo(f"second: {comparison.second}")
    click.echo(f"{number(len(comparison.differences), 'difference')} ({summary} in both):")
    for difference in comparison.differences:
        click.echo(f"- {difference.kind} {difference.name}: {difference.problem}")
