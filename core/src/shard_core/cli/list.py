"""``shard list``: which strategies are installed, and which of them can be used here."""

from __future__ import annotations

import json

import click

from shard_core import plugins


@click.command(name="list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(as_json: bool) -> None:
    """List the installed strategies."""
    installed = plugins.installed()
    if as_json:
        click.echo(json.dumps([_row(each) for each in installed], indent=2))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("name", "package", "summary", box=box.SIMPLE_HEAD)
    for each in installed:
        says = Text(each.summary)
        if each.info is not None:
            seen = plugins.where_seen(plugins.seen_on(each.name, each.distribution), when=False)
            says.append(f"\nseen on: {seen}", style="dim")
        if each.problem:
            says.append("\n" * bool(each.summary) + each.problem, style="red")
        table.add_row(each.name, f"{each.distribution} {each.version}", says)
    Console().print(table)


def _row(each: plugins.Installed) -> dict[str, object]:
    return {
        "name": each.name,
        "package": each.distribution,
        "version": each.version,
        "summary": each.summary,
        "seen_on": plugins.seen_on(each.name, each.distribution),
        "available": each.problem is None,
        "problem": each.problem,
    }
