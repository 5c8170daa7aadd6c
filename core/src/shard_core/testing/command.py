"""``python -m shard_core.testing``: the kit from the command line, for any installed strategy."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shard_core import plugins
from shard_core.errors import ShardError, nearest
from shard_core.testing.option_arguments import Assignment, values_of

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
_CAN_JUDGE = (0, 1)
"""The exit codes with which pytest ran tests: all passed, or some failed."""
_LINES = 10
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
    """Print every promise and leave."""
    if not wanted or context.resilient_parsing:
        return
    _require_pytest()
    from shard_core.testing.conformance import Conformance
    from shard_core.testing.rules import promises_of

    for each in promises_of(Conformance).values():
        click.echo(f"{each.noun}.{each.name}: {each.sentence}")
    context.exit()


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name")
@click.option("--world-sizes", type=_Sizes(), default=(1, 2, 3), help="Numbers of ranks; 1,2,3 by default.")
@click.option("--device", default="cpu", show_default=True, help="The device type it is judged on.")
@click.option(
    "--option", "assignments", type=Assignment(), multiple=True, help="An option of the strategy; repeatable."
)
@click.option("--promise", "promises", multiple=True, help="Judge only this promise; repeatable.")
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="Print every promise.")
@click.option("-v", "--verbose", is_flag=True, help="Also print the whole report of each broken promise.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of {promise, status, reason}.")
@click.pass_context
def command(  # noqa: PLR0917 - click hands everything over by name
    context: click.Context,
    name: str,
    world_sizes: tuple[int, ...],
    device: str,
    assignments: Sequence[tuple[str, str]],
    promises: Sequence[str],
    verbose: bool,
    as_json: bool,
) -> None:
    """Hold the installed strategy NAME to every promise of the contract.

    The exit status is 0 if all are kept, 1 if any is broken, 2 if the kit could not run.
    """
    try:
        info = plugins.find(name)
        options = values_of(assignments, info.options)
        sizes = _check(info, world_sizes, {"accelerator": device, **options})
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
    import torch

    from shard_core.selection import get_strategy

    get_strategy(info.name, **options)
    if options["accelerator"] == "cuda" and not torch.cuda.is_available():
        raise _CannotRun("torch sees no CUDA device here; judge the strategy with --device cpu, or where there is one.")
    sizes = tuple(size for size in world_sizes if info.max_ranks is None or size <= info.max_ranks)
    if not sizes:
        raise _CannotRun(
            f"strategy {info.name!r} runs on at most {info.max_ranks} rank{'s' * (info.max_ranks != 1)}; give "
            f"--world-sizes a number up to that."
        )
    return sizes


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
    with tempfile.TemporaryDirectory(prefix="shard-kit-") as folder, _progress() as on_case, _without_outer_settings():
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


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Show what is being judged, past pytest, which captures standard error while tests run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with os.fdopen(os.dup(sys.stderr.fileno()), "w") as terminal:
        console = Console(file=terminal)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task("starting", total=None)

            def on_case(name: str, done: int, total: int) -> None:
                bar.update(task, description=name, completed=done, total=total)
                # In a log, where no bar can move, a line now and then is the sign of life.
                if bar.disable and (done * _LINES) // total > ((done - 1) * _LINES) // total:
                    print(f"{done} of {total} cases judged, next: {name}", file=terminal, flush=True)

            yield on_case


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
