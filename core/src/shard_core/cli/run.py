"""``shard run``: torchrun, with the strategy chosen outside the script."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import click

from shard_core import plugins
from shard_core.options import OPTIONS_VARIABLE, environment_options
from shard_core.selection import check_options
from shard_core.testing.option_arguments import Assignment, values_of

_VARIABLE = "SHARD_STRATEGY"
# Where torchrun's rank 0 listens if nobody sets where.
_TORCH_PORT = 29500


class _Untouched(click.Command):
    """Leaves its arguments to torchrun's own parser."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the arguments as they were typed."""
        ctx.args = list(args)
        return ctx.args


@click.command(name="run", cls=_Untouched, add_help_option=False)
@click.pass_context
def command(context: click.Context) -> None:
    """Run a script on every rank: torchrun's options, then the script and its own."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
    from torch.distributed.run import run

    from shard_core.launcher.loopback import loopback_only

    chosen = _parser().parse_args(context.args)
    strategy = chosen.strategy or os.environ.get(_VARIABLE)
    options = _pass_on(strategy, chosen.option)
    _check_script(chosen)
    exit_code = 0
    try:
        with loopback_only() if _stays_on_this_host(chosen) else contextlib.nullcontext():
            record(run)(chosen)
    except ChildFailedError as error:
        click.echo(str(error), err=True)
        exit_code = 1
    except ValueError as error:
        # What torchrun says of an option's value, before any rank was started.
        raise click.UsageError(f"{error}.") from error
    if chosen.json:
        report: dict[str, Any] = {
            "strategy": strategy,
            "options": options,
            "script": chosen.training_script,
            "arguments": chosen.training_script_args,
            "exit_code": exit_code,
        }
        click.echo(json.dumps(report))
    context.exit(exit_code)


def _pass_on(strategy: str | None, typed: list[str]) -> dict[str, Any]:
    """Check what was chosen here, once and not on every rank, and put it where ranks look for it."""
    info = plugins.find(strategy) if strategy else None
    assignments = [Assignment().convert(each, None, None) for each in typed]
    options = {**environment_options(), **values_of(assignments, info.options if info else ())}
    if info:
        check_options(info, options)
        os.environ[_VARIABLE] = info.name
    if options:
        try:
            os.environ[OPTIONS_VARIABLE] = json.dumps(options)
        except TypeError as error:
            raise click.UsageError(f"ranks get options as JSON: {error}.") from error
    return options


def _parser() -> argparse.ArgumentParser:
    """Extend torchrun's parser by what is ours."""
    import torch
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "shard run"
    ours = parser.add_argument_group("shard")
    ours.add_argument("--strategy", metavar="NAME", help=f"The strategy of the run, passed to ranks as {_VARIABLE}.")
    ours.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"An option of the strategy, passed to ranks in {OPTIONS_VARIABLE}; repeatable.",
    )
    ours.add_argument("--json", action="store_true", help="End with one line of JSON about the run.")
    if "PET_MASTER_PORT" not in os.environ:
        parser.set_defaults(master_port=0)  # nobody has set it
    if "PET_NPROC_PER_NODE" not in os.environ:
        # As devices="auto" counts: every accelerator of this host, else one rank.
        accelerators = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
        parser.set_defaults(nproc_per_node=str(accelerators or 1))
    return parser


def _stays_on_this_host(chosen: argparse.Namespace) -> bool:
    """Return whether there is one host, and let its ranks meet out of others' reach, unless the user has chosen."""
    from shard_core.launcher.rendezvous import loopback_rendezvous

    if chosen.nnodes not in ("1", "1:1"):
        chosen.master_port = chosen.master_port or _TORCH_PORT
        return False
    ours = chosen.standalone or (chosen.rdzv_backend == "static" and not chosen.rdzv_endpoint)
    if ours and chosen.master_addr in ("127.0.0.1", "localhost"):
        chosen.standalone = False
        chosen.rdzv_backend = loopback_rendezvous()
        chosen.rdzv_endpoint = f"localhost:{chosen.master_port}"
    chosen.master_port = chosen.master_port or _TORCH_PORT
    return True


def _check_script(chosen: argparse.Namespace) -> None:
    is_file = not chosen.module and not chosen.no_python
    if is_file and not Path(chosen.training_script).is_file():
        raise click.UsageError(
            f"there is no script {chosen.training_script!r}; torchrun's options come first, then the script, "
            "then its own."
        )
