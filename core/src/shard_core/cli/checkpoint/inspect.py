"""``shard checkpoint inspect``: what is in a checkpoint, or which checkpoints are in a folder."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import TYPE_CHECKING, Any

import click

from shard_core.cli.checkpoint.arguments import FOUND_WANTING, naming_a_checkpoint, storage_options
from shard_core.cli.checkpoint.figures import age, number, size
from shard_core.cli.checkpoint.progress import progress
from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shard_core.checkpoint.inspection.inspect import Inspection, OptimizerSummary
    from shard_core.checkpoint.retention.run_folder import RunEntry

_KINDS = {"model": "weights and buffers", "optim": "optimizer state", "state": "tensors among the values"}
_WIDEST = 60


@click.command(name="inspect")
@click.argument("path", type=click.Path())
@click.option("--tensors", is_flag=True, help="List every tensor.")
@storage_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(context: click.Context, path: str, tensors: bool, as_json: bool, storage_options: dict[str, Any]) -> None:
    """Show what the checkpoint at PATH holds, or which checkpoints the folder PATH holds.

    Its tensors are not read: of its integrity only what is cheap is checked, and it says what. The exit status is 0 if
    nothing is wrong as far as that goes, 1 if something is, 2 if PATH is no checkpoint and holds none.
    """
    from shard_core.checkpoint.format.folder import is_committed
    from shard_core.checkpoint.retention.run_folder import Standing, entries_of
    from shard_core.checkpoint.storage.opening import open_folder

    with naming_a_checkpoint():
        folder = open_folder(path, storage_options)
        entries = entries_of(folder) if folder.is_folder() and not is_committed(folder) else []
        if not entries:
            inspection = _inspect(path, storage_options)
    if entries:
        if tensors:
            raise InvalidOption(f"{path!r} holds several checkpoints; give --tensors the path of one.")
        (_print_entries_json if as_json else _print_entries)(path, entries)
        context.exit(FOUND_WANTING if any(each.standing is Standing.DAMAGED for each in entries) else 0)
    if as_json:
        click.echo(json.dumps(_card(inspection, tensors), indent=2))
    else:
        _print(inspection, tensors)
    context.exit(FOUND_WANTING if inspection.problems else 0)


def _inspect(path: str, storage_options: dict[str, Any]) -> Inspection:
    from shard_core.checkpoint.inspection.inspect import inspect

    with progress("inspecting", lambda count: number(int(count), "file")) as report:
        return inspect(path, report, storage_options=storage_options)


def _print_entries_json(path: str, entries: Sequence[RunEntry]) -> None:
    card = {
        "path": path,
        "checkpoints": [
            {
                "path": str(each.path),
                "standing": each.standing.value,
                "step": each.step,
                "created": None if each.created is None else each.created / 1e9,
                "age": None if each.created is None else time.time() - each.created / 1e9,
                "bytes": each.bytes,
                "leftovers": sorted(each.leftovers),
                "foreign": list(each.unknown),
            }
            for each in entries
        ],
    }
    click.echo(json.dumps(card, indent=2))


def _print_entries(path: str, entries: Sequence[RunEntry]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    click.echo(f"{path} holds {number(len(entries), 'folder')} that saves have made:")
    table = Table("name", Column("step", justify="right"), "age", Column("size", justify="right"), "", "also in it")
    table.box = box.SIMPLE_HEAD
    styles = {"committed": "", "damaged": "bold red", "not committed": "yellow"}
    for each in entries:
        when = each.touched if each.created is None else each.created / 1e9
        also = [number(len(each.leftovers), "file") + " of dead saves"] if each.leftovers else []
        also += [number(len(each.unknown), "foreign file")] if each.unknown else []
        table.add_row(
            Text(each.folder.name),
            "" if each.step is None else str(each.step),
            age(time.time() - when),
            size(each.bytes),
            Text(each.standing.value, styles[each.standing.value]),
            ", ".join(also),
        )
    Console(highlight=False, markup=False).print(table)


def _card(inspection: Inspection, tensors: bool) -> dict[str, Any]:
    from shard_core.checkpoint.inspection.inspect import CHECKED, UNCHECKED

    # Tensors may be very many: they are not copied where nobody asks for them.
    listed = [dataclasses.asdict(each) for each in inspection.tensors] if tensors else None
    card = dataclasses.asdict(dataclasses.replace(inspection, tensors=()))
    del card["tensors"]
    card["age"] = time.time() - inspection.created
    card["integrity"] = {"checked": CHECKED, "not_checked": UNCHECKED, "problems": card.pop("problems")}
    return card if listed is None else {**card, "tensors": listed}


def _print(inspection: Inspection, tensors: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    click.echo(inspection.path)
    table = Table.grid(padding=(0, 2))
    for name, text, style in _rows(inspection):
        table.add_row(Text(name), Text(text, style))
    console = Console(highlight=False, markup=False)
    console.print(table)
    if tensors:
        console.print(_listing(inspection))


def _listing(inspection: Inspection) -> Any:
    from rich import box
    from rich.table import Column, Table
    from rich.text import Text

    table = Table("tensor", "dtype", "shape", Column("size", justify="right"), box=box.SIMPLE_HEAD)
    for each in inspection.tensors:
        shape = " x ".join(map(str, each.shape)) or "one number"
        table.add_row(Text(each.key, overflow="fold"), each.dtype, shape, size(each.bytes))
    return table


def _rows(inspection: Inspection) -> Iterator[tuple[str, str, str]]:
    """Yield the lines of the card: a name, its text, and its style."""
    from shard_core.checkpoint.inspection.inspect import CHECKED, UNCHECKED

    information = dict(inspection.information)
    yield "step", "none was saved" if inspection.step is None else f"{inspection.step:,}", ""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(inspection.created))
    yield "saved", f"{when}, {age(time.time() - inspection.created)}", ""
    strategy = information.pop("strategy", "an unknown strategy")
    yield "by", f"{strategy} on {number(inspection.world_size, 'rank')}", ""
    for name, value in information.items():
        yield name, _brief(value, 4 * _WIDEST), ""
    files = f"{number(inspection.files, 'file')}, {size(inspection.bytes)}"
    chunks = "" if inspection.chunks is None else f", {number(inspection.chunks, 'chunk')}"
    yield "form", f"{inspection.form}, {files}{chunks}", ""
    for kind, summary in inspection.kinds.items():
        if summary.tensors:
            dtypes = ", ".join(f"{count} {dtype}" for dtype, count in summary.dtypes.items())
            text = f"{number(summary.tensors, 'tensor')} ({dtypes}), {number(summary.elements, 'element')}"
            yield _KINDS[kind], f"{text}, {size(summary.bytes)}", ""
    yield "modules", ", ".join(inspection.modules) or "none", ""
    for alias, key in inspection.aliases.items():
        yield "tied", f"{alias} = {key}", ""
    for name, optimizer in inspection.optimizers.items():
        yield from _optimizer_rows(name, optimizer)
    for name, value in inspection.values.items():
        yield f"value {name}", _brief(value, _WIDEST), ""
    if inspection.leftovers:
        yield "left over", f"{number(len(inspection.leftovers), 'file')} of saves that died", "yellow"
    for problem in inspection.problems:
        yield "damaged", problem, "bold red"
    if not inspection.problems:
        yield "integrity", f"{'; '.join(CHECKED)}. Not read: {UNCHECKED} (shard checkpoint verify).", ""


def _optimizer_rows(name: str, optimizer: OptimizerSummary) -> Iterator[tuple[str, str, str]]:
    from shard_core.checkpoint.state.optimizer_record import KERNEL_CHOICES

    yield name, f"{optimizer.type} over {optimizer.module}, {number(len(optimizer.groups), 'group')}", ""
    for place, group in enumerate(optimizer.groups):
        settings = [f"{key} {value}" for key, value in group.hyper_parameters.items() if key not in KERNEL_CHOICES]
        yield f"  group {place}", ", ".join([number(group.parameters, "parameter"), *settings]), ""


def _brief(value: Any, widest: int) -> str:
    if isinstance(value, dict) and value:
        inside = ", ".join(f"{key} {_brief(item, widest)}" for key, item in value.items())
        return inside if len(inside) <= widest else f"{len(value)} entries: {', '.join(map(str, value))}"[: 2 * widest]
    text = str(value)
    return text if len(text) <= widest else f"{text[: widest - 3]}..."
