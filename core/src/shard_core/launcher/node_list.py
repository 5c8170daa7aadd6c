"""SLURM's short notations for lists of hosts and for numbers of tasks."""

from __future__ import annotations

import re

from shard_core.errors import LaunchError


def expand_hosts(expression: str) -> list[str]:
    """Write out a list of hosts.

    Args:
        expression: A list as SLURM writes it, such as ``"node[01-03,7],login"``.

    Returns:
        The host names, in order.

    Raises:
        LaunchError: If the brackets cannot be read.

    Example:
        >>> expand_hosts("node[08-10,12],gpu3")
        ['node08', 'node09', 'node10', 'node12', 'gpu3']
        >>> expand_hosts("rack[1-2]n[0-1]")
        ['rack1n0', 'rack1n1', 'rack2n0', 'rack2n1']
    """
    return [host for part in _split(expression) for host in _expand(part, expression)]


def expand_counts(expression: str) -> list[int]:
    """Write out how many tasks each host has.

    Args:
        expression: Counts as SLURM writes them, such as ``"2(x3),1"``.

    Returns:
        One count per host.

    Raises:
        LaunchError: If the expression cannot be read.

    Example:
        >>> expand_counts("2(x3),1")
        [2, 2, 2, 1]
    """
    counts = []
    for part in expression.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            raise LaunchError(f"SLURM's number of tasks per host, {expression!r}, cannot be read at {part!r}.")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _split(expression: str) -> list[str]:
    """Split at the commas outside brackets."""
    return [part for part in re.split(r",(?![^\[]*\])", expression) if part]


def _expand(part: str, expression: str) -> list[str]:
    found = re.fullmatch(r"([^\[\]]*)\[([^\[\]]*)\](.*)", part)
    if found is None:
        if "[" in part or "]" in part:
            raise LaunchError(f"SLURM's list of hosts, {expression!r}, cannot be read at {part!r}.")
        return [part]
    before, inside, after = found.groups()
    tails = _expand(after, expression)
    return [f"{before}{number}{tail}" for number in _numbers(inside, expression) for tail in tails]


def _numbers(inside: str, expression: str) -> list[str]:
    """Write out ``"01-03,7"``; leading zeros keep their width."""
    numbers = []
    for item in inside.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if found is None:
            raise LaunchError(f"SLURM's list of hosts, {expression!r}, cannot be read at {item!r}.")
        first, last = found[1], found[2] or found[1]
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers
