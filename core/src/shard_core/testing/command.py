"""``python -m shard_core.testing``: the kit from the command line, for any installed strategy."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from shard_core import plugins
from shard_core.errors import ShardError, nearest
from shard_core.testing.option_arguments import Assignment, values_of
from shard_core.testing.progress import progress

if TYPE_CHECKING:
    from rich.console import Group

    from shard_core.plugins.info import StrategyInfo
    from shard_core.testing.report import Reporter, Verdict

_FILE = """\
from shard_core.testing import Conformance


class TestStrategy(Conformance):
    strategy = {strategy!r}
    options = {options!r}
    world_sizes = {world_sizes!r}
    device = {device!r}
"""
_SIZES, _PROGRAM_SIZE = (1, 2, 3), 2
_FILE_PATH = click.Path(dir_okay=False, path_type=Path)
_OF_PROGRAMS = ("seed", "minutes", "ledger")
_OF_PROMISES = ("promises", "assignments", "verbose")
_NOT_TOGETHER = {
    "": _OF_PROGRAMS,
    "programs": ("replay", *_OF_PROMISES),
    "replay": ("world_sizes", "device", *_OF_PROGRAMS, *_OF_PROMISES),
}
"""Which options have no meaning beside which."""
_WORDS = {"promises": "promise", "assignments": "option", "world_sizes": "world-sizes"}
_CAN_JUDGE = (0, 1)
"""The exit codes with which pytest ran tests: all passed, or some failed."""
_STYLES = {"kept": "green", "broken": "bold red", "refused": "dim", "not judged": "yellow"}


class _CannotRun(click.ClickException):
    """Nothing could be judged."""

    exit_code = 2


class _Sizes(click.ParamType[tuple[int, ...]]):
    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is no list of world sizes; write numbers from 1 up, such as 1,2,3", param, ctx)
        return tuple(dict.fromkeys(int(word) for word in words))


def _list(context: click.Context, param: click.Parameter, wanted: bool) -> None:  # noqa: ARG001 - click's signature
    """Print every promise, what random programs leave out, and what they leave to a strategy; then leave."""
    if not wanted or context.resilient_parsing:
        return
    _require_pytest()
    from shard_core.testing.conformance import Conformance
    from shard_core.testing.programs.settings import LEFT_OPEN, LEFT_OUT, not_drawn
    from shard_core.testing.rules import promises_of

    for each in promises_of(Conformance).values():
        click.echo(f"{each.noun}.{each.name}: {each.sentence}")
    options = [f"{name}: {', '.join(names)}" for name, names in not_drawn().items() if names]
    lists = {"leave out": LEFT_OUT, "leave to a strategy": LEFT_OPEN, "give no value to these options": options}
    for heading, lines in lists.items():
        click.echo(f"\nRandom programs {heading}:")
        for line in lines:
            click.echo(f"- {line}")
    context.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.option(
    "--world-sizes",
    type=_Sizes(),
    help="Numbers of ranks; 1,2,3 by default. Programs: begin on the first, 2 by default, and go on with any.",
)
@click.option("--device", default="cpu", show_default=True, help="The device type it is judged on.")
@click.option(
    "--option", "assignments", type=Assignment(), multiple=True, help="An option of the strategy; repeatable."
)
@click.option("--promise", "promises", multiple=True, help="Judge only this promise; repeatable.")
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list,
    help="Print what is judged, and what not.",
)
@click.option(
    "--programs", metavar="N", type=click.IntRange(min=1), help="Run this many random programs instead of the promises."
)
@click.option(
    "--seed", metavar="N", type=click.IntRange(min=0), help="Of the first program; by default the ledger's, or 0."
)
@click.option(
    "--minutes", metavar="N", type=click.FloatRange(min=0, min_open=True), help="Begin no program after that."
)
@click.option("--ledger", type=_FILE_PATH, help="A JSON file that keeps each strategy's next seed from run to run.")
@click.option("--replay", type=_FILE_PATH, help="Run this one program, a JSON file that --programs has written.")
@click.option("-v", "--verbose", is_flag=True, help="Also print the whole report of each broken promise.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of {promise, status, reason}, or the report.")
@click.pass_context
def command(  # noqa: PLR0917 - click hands everything over by name
    context: click.Context,
    /,
    name: str,
    world_sizes: tuple[int, ...] | None,
    device: str,
    assignments: Sequence[tuple[str, str]],
    promises: Sequence[str],
    verbose: bool,
    as_json: bool,
    **of_programs: Any,
) -> None:
    """Hold the installed strategy NAME to every promise of the contract, or random programs to plain PyTorch.

    The exit status is 0 if all are kept, 1 if any is broken or a program shows a defect, 2 if the kit could not run.
    """
    try:
        _check_together(context)
        info = plugins.find(name)
        if of_programs["programs"] or of_programs["replay"]:
            context.exit(_run_programs(context, info))
        options = values_of(assignments, info.options)
        sizes = _check(info, world_sizes or _SIZES, {"accelerator": device, **options})
    except ShardError as error:
        raise _CannotRun(str(error)) from error
    chosen = [_promise(text) for text in promises]
    verdicts, code = _run(info, options, sizes, device, chosen)
    if as_json:
        rows = [{"promise": each.name, "status": each.status.value, "reason": each.reason} for each in verdicts]
        click.echo(json.dumps(rows, indent=2))
    else:
        _print(name, sizes, verdicts)
    if verbose:
        for each in verdicts:
            if each.detail:
                click.echo(f"\n{each.name}\n{each.detail}", err=True)
    context.exit(code)


def _check(info: StrategyInfo, world_sizes: tuple[int, ...], options: Mapping[str, Any]) -> tuple[int, ...]:
    """Find out what can be found out before any rank is started; return the sizes it can be judged at."""
    _require_pytest()
    from shard_core.selection import get_strategy

    get_strategy(info.name, **options)
    _require_device(options["accelerator"])
    return _possible(info, world_sizes)


def _require_device(name: str) -> None:
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise _CannotRun("torch sees no CUDA device here; judge the strategy with --device cpu, or where there is one.")


def _possible(info: StrategyInfo, world_sizes: tuple[int, ...]) -> tuple[int, ...]:
    sizes = tuple(size for size in world_sizes if info.max_ranks is None or size <= info.max_ranks)
    if not sizes:
        raise _CannotRun(
            f"strategy {info.name!r} runs on at most {info.max_ranks} rank{'s' * (info.max_ranks != 1)}; give "
            f"--world-sizes a number up to that."
        )
    return sizes


def _check_together(context: click.Context) -> None:
    """Refuse options that have no meaning beside the others: they would be ignored in silence."""
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    mode = next((each for each in ("programs", "replay") if each in given), "")
    wrong = next((each for each in _NOT_TOGETHER[mode] if each in given), None)
    if wrong:
        beside = f"with --{mode}" if mode else "without --programs"
        raise _CannotRun(f"--{_WORDS.get(wrong, wrong)} has no meaning {beside}.")


def _run_programs(context: click.Context, info: StrategyInfo) -> int:
    """Run random programs, or the one in a file; this needs no pytest."""
    from shard_core.testing.programs.command_line import program_from, replay_file, run_programs

    given = context.params
    plugins.plugins().check_available(info.name)
    if given["replay"] is not None:
        program = program_from(given["replay"])
        _possible(info, (program.world_size,))
        return replay_file(info.name, program, as_json=given["as_json"])
    device = _device_of_programs(info, given["device"])
    sizes = _possible(info, given["world_sizes"] or (min(_PROGRAM_SIZE, info.max_ranks or _PROGRAM_SIZE),))
    asked = {name: given[name] for name in ("seed", "minutes", "ledger", "as_json")}
    return run_programs(info.name, given["programs"], world_sizes=sizes, device=device, **asked)


def _device_of_programs(info: StrategyInfo, name: str) -> str:
    """Return what programs call the device; the CPU is what ``--device`` says if nobody does."""
    if name == "cpu":
        return ""
    if name not in info.devices:
        raise _CannotRun(f"strategy {info.name!r} runs on {', '.join(info.devices)}, not on {name!r}.")
    _require_device(name)
    return name


def _require_pytest() -> None:
    if importlib.util.find_spec("pytest") is None:
        raise _CannotRun("the kit runs on pytest, which is not installed; install shard-core[testing].")


def _promise(text: str) -> str:
    """Find the promise that is meant, with or without its noun."""
    from shard_core.testing.conformance import Conformance
    from shard_core.testing.rules import promises_of

    known = promises_of(Conformance)
    noun, _, name = text.rpartition(".")
    if name not in known or noun not in ("", known[name].noun):
        hint = nearest(name, known) or "."
        raise _CannotRun(f"there is no promise {text!r}{hint} All are: {', '.join(sorted(known))}.")
    return name


def _run(
    info: StrategyInfo, options: Mapping[str, Any], sizes: tuple[int, ...], device: str, chosen: Sequence[str]
) -> tuple[list[Verdict], int]:
    """Run pytest on a test file like an author's, out of reach of whatever configures tests around here."""
    import pytest

    from shard_core.testing.report import Reporter

    text = _FILE.format(strategy=info.name, options=dict(options), world_sizes=sizes, device=device)
    with (
        tempfile.TemporaryDirectory(prefix="shard-kit-") as folder,
        progress("cases judged, next") as on_case,
        _without_outer_settings(),
    ):
        test = Path(folder, "test_strategy.py")
        test.write_text(text)
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n")
        reporter = Reporter(info.capabilities, chosen, on_case)
        # Neither pytest's own terminal nor its cache; and the promises' file belongs to no package.
        quiet = ("-p", "no:terminal", "-p", "no:cacheprovider", "--import-mode=importlib")
        place = ("-c", str(settings), "--rootdir", folder, "--confcutdir", folder)
        code = pytest.main(["-p", "shard_core.testing.fixtures", *quiet, *place, str(test)], [reporter])
    if code not in _CAN_JUDGE:
        raise _CannotRun(_why(reporter, int(code)))
    return reporter.verdicts(), int(code)


def _why(reporter: Reporter, code: int) -> str:
    if code == 2 and not reporter.errors:
        return "it was interrupted."
    return "\n".join(["the kit could not run.", *reporter.errors])


@contextlib.contextmanager
def _without_outer_settings() -> Iterator[None]:
    """Keep pytest from what the environment and other packages would have it do."""
    before = dict(os.environ)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _print(name: str, sizes: Sequence[int], verdicts: Sequence[Verdict]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("promise", min_width=max(len(each.name) for each in verdicts))
    table.add_column("status")
    nouns = dict.fromkeys(each.promise.noun for each in verdicts)
    for noun in nouns:
        for each in (each for each in verdicts if each.promise.noun == noun):
            word = each.status.value
            table.add_row(each.name, Text(word, _STYLES[word]))
        table.add_section()
    console.print(table)
    for each in verdicts:
        if each.status.value == "broken":
            console.print(_explained(each))
    for (word, reason), count in _without_verdict(verdicts).items():
        console.print(Text(f"{count} promise{'s' * (count != 1)} {word}: {reason}", _STYLES[word]))
    counts = {word: sum(each.status.value == word for each in verdicts) for word in _STYLES}
    summed = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    ranks = " and ".join(filter(None, [", ".join(map(str, sizes[:-1])), str(sizes[-1])]))
    console.print(f"{name} on {ranks} rank{'s' * (sizes != (1,))}: {summed}.")


def _without_verdict(verdicts: Sequence[Verdict]) -> Counter[tuple[str, str]]:
    """Count the promises that are neither kept nor broken, by status and reason: one mistake leaves many unjudged."""
    others = [each for each in verdicts if each.status.value != "broken" and each.reason]
    return Counter((each.status.value, each.reason) for each in others)


def _explained(verdict: Verdict) -> Group:
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    lines = (
        f"Promised: {verdict.promise.sentence}",
        f"Found: {verdict.reason}",
        f"Usual cause: {verdict.promise.cause}",
    )
    says = [Padding(Text(line), (0, 0, 0, 2)) for line in lines]
    return Group(Text(f"{verdict.name} is broken", style=_STYLES["broken"]), *says, Text())
