"""``shard doctor``: what this machine offers, and what stands in the way of training on it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

import click
from packaging.requirements import Requirement

from shard_core import plugins
from shard_core.errors import ShardError
from shard_core.plugins import hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

_CORE = "shard-core"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: What it is.
        says: What was found.
        problem: Whether it stands in the way.
    """

    subject: str
    says: str
    problem: bool = False


@click.command(name="doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Check the installation; exit with 1 if something is wrong."""
    findings = [
        Finding(subject="Python", says=f"{platform.python_version()} on {platform.platform(terse=True)}"),
        *_packages(),
        _provenance(),
        *_strategies(),
        *_torch(),
        _environment(),
        _threads(),
    ]
    healthy = not any(finding.problem for finding in findings)
    if as_json:
        rows = [dataclasses.asdict(finding) for finding in findings]
        click.echo(json.dumps({"healthy": healthy, "findings": rows}, indent=2))
    else:
        _print(findings)
    ctx.exit(0 if healthy else 1)


def _packages() -> Iterator[Finding]:
    """List Shard's packages and compare what they require with what is installed."""
    for name in sorted({_CORE, *(each.distribution for each in plugins.installed())}):
        package = importlib.metadata.distribution(name)
        unmet = [sentence for line in package.requires or () if (sentence := _unmet(line))]
        says = f"{package.version}; {'; '.join(unmet)}" if unmet else package.version
        yield Finding(subject=name, says=says, problem=bool(unmet))


def _unmet(line: str) -> str | None:
    requirement = Requirement(line)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    wants = f"wants {requirement.name}{requirement.specifier}"
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wants}, which is not installed"
    met = requirement.specifier.contains(found, prereleases=True)
    return None if met else f"{wants}, and {found} is installed"


def _provenance() -> Finding:
    """Check whether the code that runs is that of the installed distribution.

    The public index has a stranger's distribution of the same name with a package of the same name.
    """
    package = importlib.metadata.distribution(_CORE)
    source = Path(hooks.__file__).resolve()
    owned = {Path(str(package.locate_file(file))).resolve() for file in package.files or ()}
    ours = source in owned or any(folder in source.parents for folder in _editable(package))
    says = f"imported from {source.parents[1]}"
    if not ours:
        says += (
            f", which {_CORE} {package.version} does not own; uninstall {_CORE}, which may be a stranger's "
            f"package of the same name, and install this one from its wheel or folder"
        )
    return Finding(subject="shard_core", says=says, problem=not ours)


def _editable(package: importlib.metadata.Distribution) -> list[Path]:
    """Return the folder a distribution was installed from, if it runs from there (PEP 610)."""
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return []
    return [Path(urllib.request.url2pathname(urllib.parse.urlsplit(origin["url"]).path)).resolve()]


def _strategies() -> Iterator[Finding]:
    for each in plugins.installed():
        says = each.problem or f"{each.summary} ({each.distribution})"
        yield Finding(subject=f"strategy {each.name}", says=says, problem=each.problem is not None)


def _torch() -> Iterator[Finding]:
    try:
        import torch
        from torch import distributed
    except (ImportError, OSError) as error:
        says = f"cannot be imported ({type(error).__name__}: {error}); install it before {_CORE}"
        yield Finding(subject="torch", says=says, problem=True)
        return
    yield Finding(subject="torch", says=torch.__version__)
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        yield Finding(subject="devices", says=f"{torch.accelerator.device_count()} x {kind}")
    else:
        yield Finding(subject="devices", says=f"no accelerator; {os.cpu_count()} CPU cores")
    if not distributed.is_available():
        says = "missing from this build of torch; only one process can train"
        yield Finding(subject="torch.distributed", says=says, problem=True)
        return
    backends = {"gloo": distributed.is_gloo_available(), "nccl": distributed.is_nccl_available()}
    found = ", ".join(name for name, available in backends.items() if available)
    yield Finding(subject="torch.distributed", says=found or "neither gloo nor nccl", problem=not found)


def _environment() -> Finding:
    from shard_core.launcher.environment import detect

    try:
        place = detect()
    except ShardError as error:
        return Finding(subject="launcher", says=str(error), problem=True)
    if place is None:
        return Finding(subject="launcher", says="none recognised; launch() starts ranks on this host")
    says = f"{place.source}: rank {place.rank} of {place.world_size}"
    return Finding(subject="launcher", says=f"{says}, rank 0 at {place.main_address}:{place.main_port}")


def _threads() -> Finding:
    threads = os.environ.get("OMP_NUM_THREADS")
    says = threads or f"not set; every rank on this host computes with {os.cpu_count()} threads"
    return Finding(subject="OMP_NUM_THREADS", says=says)


def _print(findings: list[Finding]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False)
    for each in findings:
        table.add_row(each.subject, Text(f"{'PROBLEM: ' * each.problem}{each.says}", "red" * each.problem))
    console = Console()
    console.print(table)
    count = sum(each.problem for each in findings)
    console.print("No problem was found." if not count else f"Problems found: {count}.")
