"""``shard checkpoint``: looking after checkpoints, whichever strategy wrote them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

import click

from shard_core.errors import CheckpointNotFound

if TYPE_CHECKING:
    from shard_core.checkpoint.verify import Verdict

_FOUND_WANTING = 1


class _Unusable(click.ClickException):
    """The arguments name nothing that can be looked after."""

    exit_code = 2


@click.group(name="checkpoint")
def command() -> None:
    """Look after checkpoints."""


@command.command()
@click.argument("path", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(context: click.Context, path: str, as_json: bool) -> None:
    """Read the checkpoint at PATH as a whole and name every damaged tensor.

    The exit status is 0 if it is fine, 1 if anything is damaged, 2 if PATH is no checkpoint.
    """
    try:
        verdict = _verify(path)
    except (CheckpointNotFound, PermissionError) as error:
        raise _Unusable(str(error)) from error
    if as_json:
        click.echo(json.dumps({**dataclasses.asdict(verdict), "is_fine": verdict.is_fine}, indent=2))
    else:
        _print(verdict)
    context.exit(0 if verdict.is_fine else _FOUND_WANTING)


def _verify(path: str) -> Verdict:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from shard_core.checkpoint.verify import verify as verify_checkpoint

    console = Console(stderr=True)
    columns = (TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("verify", total=None)
        return verify_checkpoint(path, lambda done, total: bar.update(task, completed=done, total=total))


def _print(verdict: Verdict) -> None:
    size = f"{verdict.tensors} tensors, {verdict.bytes / 1e6:.1f} MB"
    if verdict.is_fine:
        click.echo(f"{verdict.path}: fine ({size}).")
        return
    click.echo(f"{verdict.path}: damaged ({size}).")
    for damage in verdict.damage:
        place = f" in {damage.file}" if damage.file else ""
        click.echo(f"- {damage.tensor or 'the checkpoint'}{place}: {damage.problem}")
