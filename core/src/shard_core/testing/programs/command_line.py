"""Random programs from the command line: many of a strategy, or one from a file."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shard_core.errors import InvalidOption, nearest
from shard_core.testing.programs.campaign import VERDICTS, campaign, replay
from shard_core.testing.programs.grammar import legal
from shard_core.testing.programs.parts import PARTS
from shard_core.testing.programs.program import from_json
from shard_core.testing.programs.settings import PRECISIONS
from shard_core.testing.progress import progress

if TYPE_CHECKING:
    from shard_core.testing.programs.campaign import Defect, Report
    from shard_core.testing.programs.judgement import Judgement
    from shard_core.testing.programs.program import Program

_REASONS = 10


def run_programs(
    strategy: str,
    count: int,
    *,
    world_sizes: tuple[int, ...],
    device: str = "",
    seed: int | None = None,
    minutes: float | None = None,
    ledger: Path | None = None,
    as_json: bool = False,
) -> int:
    """Run random programs of a strategy and print what came of them.

    Args:
        strategy: Its name.
        count: How many.
        world_sizes: How many ranks, and how many programs may go on with.
        device: The device type they compute on; ``""`` for the CPU, or else the one that the strategy has.
        seed: The first; by default the ledger's, or 0.
        minutes: When to stop.
        ledger: A JSON file of each strategy's next seed, which is read and written.
        as_json: Whether to print JSON.

    Returns:
        The exit status: 1 if there is a defect, whose program is written to the current folder, or if nearly all were
            refused.

    Raises:
        InvalidOption: If the ledger is none.
    """
    seeds = _read_ledger(ledger) if ledger else {}
    first = seeds.get(strategy, 0) if seed is None else seed
    done = 0
    with progress("programs judged, last") as on_step:

        def on_program(origin: str, judgement: Judgement) -> None:
            nonlocal done
            # Kept programs are not among those that were asked for.
            done += origin.startswith("seed ")
            on_step(f"{origin}, {judgement.verdict}", done, count)

        report = campaign(
            strategy,
            count=count,
            seed=first,
            minutes=minutes,
            device=device,
            world_size=world_sizes[0],
            sizes=world_sizes if len(world_sizes) > 1 else (),
            on_program=on_program,
        )
    if ledger:
        _write_ledger(ledger, {**seeds, strategy: max(report.next_seed, seeds.get(strategy, 0))})
    file = _write(strategy, report.defect) if report.defect else None
    if as_json:
        click.echo(json.dumps(_record(report, file), indent=2))
    else:
        _print(report, file)
    return int(not report.passed)


def replay_file(strategy: str, program: Program, *, as_json: bool = False) -> int:
    """Run one program and print what came of it.

    Args:
        strategy: The name of the strategy it begins under, whatever it was drawn for.
        program: What ``program_from`` read.
        as_json: Whether to print JSON.

    Returns:
        The exit status: 1 if it shows a defect.
    """
    judgement = replay(dataclasses.replace(program, strategy=strategy))
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(judgement), indent=2))
    else:
        ranks = f"{program.world_size} rank{'s' * (program.world_size != 1)}"
        about = ": ".join(filter(None, [judgement.verdict, judgement.symptom]))
        settled = " after a bound was broken by rounding" if judgement.settled else ""
        click.echo(f"{strategy} on {ranks}: {about}{settled}.")
        if judgement.text:
            click.echo(judgement.text)
    return int(judgement.verdict == "defect")


def program_from(path: Path) -> Program:
    """Read a program from a file.

    Args:
        path: JSON, as a campaign writes it.

    Returns:
        The program; legal.

    Raises:
        InvalidOption: If the file cannot be read or holds no legal program.
    """
    try:
        program = from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(f"the program {str(path)!r} cannot be read: {_reason(error)}.") from error
    except InvalidOption as error:
        raise InvalidOption(f"{path}: {error}") from error
    for part in (part for model in program.models for part in model.parts):
        if part not in PARTS:
            hint = nearest(part, PARTS) or ";"
            raise InvalidOption(f"{path}: {part!r} is no part of a model{hint} there are: {', '.join(PARTS)}.")
    if program.precision not in PRECISIONS:
        hint = nearest(program.precision, PRECISIONS) or ";"
        raise InvalidOption(
            f"{path}: {program.precision!r} is no precision of programs{hint} there are: {', '.join(PRECISIONS)}."
        )
    if not legal(program):
        raise InvalidOption(
            f"{path}: its operations are not legal in plain PyTorch in their order, or name a module or an optimizer "
            f"that it has not; replay what a campaign has written."
        )
    return program


def _read_ledger(path: Path) -> dict[str, int]:
    if not path.exists():
        return {}
    try:
        seeds = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidOption(f"the ledger {str(path)!r} cannot be read: {_reason(error)}.") from error
    if not isinstance(seeds, dict) or not all(type(each) is int and each >= 0 for each in seeds.values()):
        raise InvalidOption(f"the ledger {str(path)!r} is no JSON object of strategies' names and next seeds.")
    return seeds


def _write_ledger(path: Path, seeds: dict[str, int]) -> None:
    """Replace the ledger as a whole: a run that is killed leaves the old one."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(seeds, indent=2, sort_keys=True) + "\n")
        beside.replace(path)
    except OSError as error:
        raise InvalidOption(f"the ledger {str(path)!r} cannot be written: {_reason(error)}.") from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _write(strategy: str, defect: Defect) -> str:
    """Write a defect's program to the current folder."""
    file = f"program-{strategy}-{defect.origin.removeprefix('seed ')}.json"
    Path(file).write_text(defect.program.to_json())
    return file


def _record(report: Report, file: str | None) -> dict[str, Any]:
    record = dataclasses.asdict(report)
    record["programs_per_second"] = report.programs_per_second
    record["in_memory_per_second"] = report.in_memory_per_second
    if report.defect:
        record["defect"] = {
            "origin": report.defect.origin,
            **dataclasses.asdict(report.defect.judgement),
            "program": json.loads(report.defect.program.to_json()),
            "script": report.defect.script,
            "file": file,
        }
    return record


def _print(report: Report, file: str | None) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, show_header=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for verdict in VERDICTS:
        note = f", {report.settled} of them settled as rounding" if verdict == "equal" and report.settled else ""
        table.add_row(verdict, f"{report.verdicts[verdict]}{note}")
    table.add_section()
    for name, share in (("pairs of operations", report.pairs), ("operations on parts, by setting", report.cells)):
        table.add_row(name, f"{share.share:.0%}, {share.seen} of {share.of}")
    table.add_row("median length", f"{report.median_length:g} operations")
    table.add_row("programs per second", f"{report.programs_per_second:.2f}")
    table.add_row("of those without compiling and files", f"{report.in_memory_per_second:.2f}")
    if report.growth is not None:
        grows = ", which grows without end" * report.grows
        table.add_row("memory kept", f"{report.growth / 1024:.0f} KiB a program{grows}")
    table.add_row("checkpoints also loaded under", ", ".join(report.others) or "itself alone")
    console.print(table)
    if report.refusals:
        reasons = Table("refused", "by", "because", box=box.SIMPLE_HEAD)
        for each in report.refusals[:_REASONS]:
            reasons.add_row(str(each.count), each.symptom, Text(each.sentence))
        console.print(reasons)
    if report.defect:
        _explain(report.defect, file)
    kept = f", {report.kept} of them regression programs that come with the kit" * bool(report.kept)
    ranks = f"{report.world_size} rank{'s' * (report.world_size != 1)}"
    found = "a defect" if report.defect or report.grows else "no defect"
    summed = f"{report.count} program{'s' * (report.count != 1)}{kept}, {found}"
    if not (report.passed or report.defect or report.grows):
        console.print("More than nine in ten programs were refused, which says nothing of what the strategy computes.")
    console.print(f"{report.strategy} on {ranks}: {summed}; the next seed is {report.next_seed}.")


def _explain(defect: Defect, file: str | None) -> None:
    """Print a defect plainly: its script is there to be copied."""
    click.echo(f"{defect.origin} shows a defect: {defect.judgement.symptom}")
    click.echo(f"{defect.judgement.text.rstrip()}\n\n{defect.script}")
    click.echo(f"It was shrunk from {len(defect.drawn.operations)} to {len(defect.program.operations)} operations.")
    click.echo(
        f"Its program is in {file}: python -m shard_core.testing {defect.program.strategy} --replay {file} runs it "
        "again, and with another strategy's name shows whose defect it is. No further program was run.\n"
    )
