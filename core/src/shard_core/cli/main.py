"""The ``shard`` command; a verb's module is imported when the verb is used."""

from __future__ import annotations

import importlib
from typing import Any

import click

from shard_core.errors import ShardError

#: Every verb is one module of this package, with its click command under the name ``command``.
VERBS = ("checkpoint", "doctor", "list", "parity", "run", "show", "tune")


class _Verbs(click.Group):
    """Loads verbs late, and turns errors raised on purpose into one sentence and an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """List the verbs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's
        """Import one verb."""
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"shard_core.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb."""
        try:
            return super().invoke(ctx)
        except ShardError as error:
            kind = _Mistake if isinstance(error, LookupError | ValueError) else _Failure
            raise kind(str(error)) from error


class _Failure(click.ClickException):
    """What was asked for cannot be done here."""

    exit_code = 1


class _Mistake(click.ClickException):
    """Something was asked for that is not there, or not allowed."""

    exit_code = 2


@click.command(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shard-core", prog_name="shard")
def main() -> None:
    """Distributed PyTorch training with pluggable strategies."""
