"""``shard show``: everything a strategy declares about itself, and its options."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from shard_core import plugins
from shard_core.capability import Capability
from shard_core.errors import StrategyUnavailable
from shard_core.options import Option, options_of
from shard_core.precision.interface import PrecisionPolicy
from shard_core.precision.policies import POLICIES
from shard_core.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import Group
    from rich.table import Table


@click.command(name="show")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str, as_json: bool) -> None:
    """Show what the strategy NAME promises and takes."""
    card = _card(name)
    if as_json:
        click.echo(json.dumps(card, indent=2, default=str))
    else:
        _print(card)


def _card(name: str) -> dict[str, Any]:
    finder = plugins.plugins()
    info, offer = finder.find(name), finder.offer(name)
    problem = None
    try:
        finder.check_available(name)
    except StrategyUnavailable as error:
        problem = str(error)
    return {
        "name": info.name,
        "package": offer.distribution,
        "version": offer.version,
        "summary": info.summary,
        "available": problem is None,
        "problem": problem,
        "capabilities": [
            {"name": each.name, "promise": each.value} for each in Capability if each in info.capabilities
        ],
        "precisions": [_precision({**POLICIES, **info.policies}, each) for each in info.precisions],
        "devices": list(info.devices),
        "seen_on": plugins.seen_on(name, offer.distribution),
        "options": _options(info.options, info.presets),
        "common_options": _options(options_of(RunOptions), {}),
    }


def _precision(policies: Mapping[str, PrecisionPolicy], name: str) -> dict[str, Any]:
    return dataclasses.asdict(policies[name]) if name in policies else {"name": name}


def _options(options: Iterable[Option], presets: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "type": each.type,
            "default": presets.get(each.name, each.default),
            "help": each.help,
        }
        for each in options
    ]


def _print(card: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    console.print(Text(f"{card['name']}: {card['summary']}"))
    console.print(Text(f"{card['package']} {card['version']}, on {', '.join(card['devices'])}"))
    console.print(Text(f"seen to run on: {plugins.where_seen(card['seen_on'])}"))
    if card["problem"]:
        console.print(Text(card["problem"], style="red"))
    console.print(_listing("Promises", {each["name"]: each["promise"] for each in card["capabilities"]}))
    console.print(_dtypes(card["precisions"]))
    for title, key in (("Options", "options"), ("Options of every strategy", "common_options")):
        console.print(_listing(title, {_signature(each): each["help"] for each in card[key]}))


def _listing(title: str, entries: Mapping[str, str]) -> Group:
    """Format names with a sentence under each."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines: list[Text | Padding] = [Text(f"\n{title}", style="bold")]
    for name, sentence in entries.items():
        lines += [Padding(Text(name), (0, 0, 0, 2)), Padding(Text(sentence, style="dim"), (0, 0, 0, 6))]
    return Group(*lines if entries else [*lines, Padding(Text("none"), (0, 0, 0, 2))])


def _dtypes(precisions: Sequence[Mapping[str, Any]]) -> Table:
    """Draw one column per precision and one row per use of a dtype."""
    from rich import box
    from rich.table import Table

    table = Table(
        "",
        *(each["name"] for each in precisions),
        title="\nPrecisions",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for field in dataclasses.fields(PrecisionPolicy):
        if field.name != "name":
            table.add_row(field.name, *(_cell(each.get(field.name, "?")) for each in precisions))
    return table


def _signature(option: Mapping[str, Any]) -> str:
    default = option["default"]
    shown = repr(default) if isinstance(default, str) else str(default)
    return f"{option['name']}: {option['type']} = {shown}"


def _cell(value: str | bool) -> str:
    return value if isinstance(value, str) else "yes" if value else "no"
