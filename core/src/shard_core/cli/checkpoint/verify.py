"""``shard checkpoint verify``: whether every byte is as it was committed."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from shard_core.cli.checkpoint.arguments import FOUND_WANTING, naming_a_checkpoint, storage_options
from shard_core.cli.checkpoint.figures import size
from shard_core.cli.checkpoint.progress import progress

if TYPE_CHECKING:
    from shard_core.checkpoint.inspection.verify import Verdict


@click.command(name="verify")
@click.argument("path", type=click.Path())
@storage_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, path: str, as_json: bool, storage_options: dict[str, Any]) -> None:
    """Read the checkpoint at PATH as a whole and name every damaged tensor.

    The exit status is 0 if it is fine, 1 if anything is damaged, 2 if PATH is no checkpoint.
    """
    from shard_core.checkpoint.inspection.verify import verify

    with naming_a_checkpoint(), progress("verifying", size) as report:
        verdict = verify(path, report, storage_options=storage_options)
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(verdict), "is_fine": verdict.is_fine}, indent=2))
    else:
        _print(verdict)
    context.exit(0 if verdict.is_fine else FOUND_WANTING)


def _print(verdict: Verdict) -> None:
    summary = f"{verdict.tensors} tensors, {verdict.bytes / 1e6:.1f} MB"
    if verdict.is_fine:
        click.echo(f"{verdict.path}: fine ({summary}).")
        return
    click.echo(f"{verdict.path}: damaged ({summary}).")
    for damage in verdict.damage:
        place = f" in {damage.file}" if damage.file else ""
        click.echo(f"- {damage.tensor or 'the checkpoint'}{place}: {damage.problem}")
