"""``shard checkpoint prune``: removing old checkpoints, and what saves that died left."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from shard_core.cli.checkpoint.arguments import FOUND_WANTING, Unusable, naming_a_checkpoint, storage_options
from shard_core.cli.checkpoint.figures import age, number, size
from shard_core.cli.checkpoint.progress import progress
from shard_core.errors import CheckpointError

if TYPE_CHECKING:
    from shard_core.checkpoint.retention.policy import Decision


@click.command(name="prune")
@click.argument("folder", metavar="RUN_FOLDER", type=click.Path())
@click.option("--keep-last", type=click.IntRange(min=1), metavar="N", help="How many of the newest stay.")
@click.option("--keep-every", type=click.IntRange(min=1), metavar="K", help="Steps that are multiples of K stay too.")
@click.option("--leftovers", is_flag=True, help="Take every save that is not committed for dead, however young.")
@click.option("--dry-run", is_flag=True, help="Remove nothing, only show what would be removed.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@storage_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON; goes with --yes or --dry-run.")
@click.pass_context
def command(context: click.Context, /, folder: str, keep_last: int | None, keep_every: int | None, **args: Any) -> None:
    """Remove old checkpoints from RUN_FOLDER, and files of saves that died a day ago or longer.

    The newest checkpoint always stays, and so does any folder that holds a file no save made. Without --keep-last and
    --keep-every all checkpoints stay, and only files of dead saves go. The exit status is 0 if all went well, 1 if
    something could not be removed, 2 if the arguments cannot be used.
    """
    from shard_core.checkpoint.retention.policy import SAFE_AGE, Retention, decide
    from shard_core.checkpoint.retention.run_folder import run_entries

    rule = Retention(keep_last=keep_last or 1, keep_every=keep_every) if keep_last or keep_every else None
    with naming_a_checkpoint():
        decisions = decide(
            run_entries(folder, storage_options=args["storage_options"]),
            rule,
            safe_age=0.0 if args["leftovers"] else SAFE_AGE,
        )
    as_json, dry_run = args["as_json"], args["dry_run"]
    chosen = [decision for decision in decisions if decision.removes != "nothing"]
    if not as_json:
        _print(decisions, chosen)
    if chosen and not dry_run and not args["yes"]:
        _ask(folder, chosen, as_json)
    failures = {} if dry_run else _remove(chosen)
    if as_json:
        click.echo(json.dumps(_card(folder, decisions, failures, dry_run), indent=2))
    elif chosen and not dry_run:
        freed = sum(each.bytes for each in chosen if str(each.entry.path) not in failures)
        click.echo(f"Removed {len(chosen) - len(failures)} of {len(chosen)}; {size(freed)} are free.")
    for problem in failures.values():
        click.echo(problem, err=True)
    context.exit(FOUND_WANTING if failures else 0)


def _ask(folder: str, chosen: Sequence[Decision], as_json: bool) -> None:
    if as_json or not sys.stdin.isatty():
        raise Unusable(
            f"{number(len(chosen), 'folder')} in {folder!r} would lose files, and nobody is there to be asked; say "
            "--yes to remove them, or --dry-run to see them."
        )
    click.confirm("Remove them?", abort=True, err=True)


def _remove(chosen: Sequence[Decision]) -> dict[str, str]:
    from shard_core.checkpoint.retention.removal import remove_entry, remove_leftovers

    failures = {}
    with progress("removing", size) as report:
        done, total = 0, sum(decision.bytes for decision in chosen)
        for decision in chosen:
            try:
                if decision.removes == "leftovers":
                    remove_leftovers(decision.entry)
                else:
                    remove_entry(decision.entry, leftovers=decision.removes == "all")
            except CheckpointError as error:
                failures[str(decision.entry.path)] = str(error)
            done += decision.bytes
            report(done, total)
    return failures


def _card(folder: str, decisions: Sequence[Decision], failures: dict[str, str], dry_run: bool) -> dict[str, Any]:
    return {
        "path": folder,
        "dry_run": dry_run,
        "entries": [
            {
                "path": str(each.entry.path),
                "standing": each.entry.standing.value,
                "step": each.entry.step,
                "created": None if each.entry.created is None else each.entry.created / 1e9,
                "removes": each.removes,
                "reason": each.reason,
                "bytes": each.bytes,
                "problem": failures.get(str(each.entry.path)),
            }
            for each in decisions
        ],
    }


def _print(decisions: Sequence[Decision], chosen: Sequence[Decision]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    goes = Text("goes", "red")
    words = {"nothing": Text("stays"), "all": goes, "checkpoint": goes, "leftovers": Text("is cleaned", "yellow")}
    table = Table("name", Column("step", justify="right"), "age", Column("frees", justify="right"), "", "why")
    table.box = box.SIMPLE_HEAD
    for each in decisions:
        when = each.entry.touched if each.entry.created is None else each.entry.created / 1e9
        step = "" if each.entry.step is None else str(each.entry.step)
        frees = size(each.bytes) if each.bytes else ""
        table.add_row(
            Text(each.entry.folder.name), step, age(time.time() - when), frees, words[each.removes], each.reason
        )
    if decisions:
        Console(highlight=False, markup=False).print(table)
    if not chosen:
        click.echo("Nothing to remove.")
