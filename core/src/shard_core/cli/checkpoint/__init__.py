"""``shard checkpoint``: one module per verb, for checkpoints of any strategy, and what the verbs share."""

from __future__ import annotations

import click

from shard_core.cli.checkpoint import compare, export, inspect, prune, verify


@click.group(name="checkpoint")
def command() -> None:
    """Inspect, verify, compare, export and prune checkpoints."""


for _verb in (compare, export, inspect, prune, verify):
    command.add_command(_verb.command)
