"""Choosing a strategy by name: find it, check everything that can be checked without torch, build it."""

from __future__ import annotations

import dataclasses
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shard_core import plugins
from shard_core.errors import InvalidOption, UnsupportedPrecision
from shard_core.options import check_names
from shard_core.precision.policies import resolve_name
from shard_core.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from shard_core.collectives.interface import Collectives
    from shard_core.launcher.interface import Launcher, ProcessInfo
    from shard_core.plugins.info import StrategyInfo
    from shard_core.precision.interface import Precision, PrecisionPolicy
    from shard_core.strategy import Strategy

_VARIABLE = "SHARD_STRATEGY"


def get_strategy(
    name: str | None = None,
    *,
    accelerator: str = "auto",
    devices: int | str | Sequence[int] = "auto",
    parallel_devices: Sequence[torch.device] | None = None,
    num_nodes: int = 1,
    cluster_environment: ProcessInfo | None = None,
    precision: str | int | PrecisionPolicy | Precision = "32-true",
    collectives: str | Collectives | None = None,
    launcher: Launcher | None = None,
    checkpoint_io: Any = None,
    process_group_backend: str | None = None,
    timeout: timedelta = timedelta(minutes=30),
    guard_timeout: timedelta = timedelta(seconds=60),
    **options: Any,
) -> Strategy:
    """Find the strategy of a name, check what it is told, and build it; nothing is started yet.

    Args:
        name: The strategy's name, as ``shard list`` shows it; else what ``SHARD_STRATEGY`` says.
        accelerator: Device type: ``"auto"``, ``"cpu"``, ``"cuda"`` (``"gpu"``), ``"xla"`` (``"tpu"``).
        devices: Ranks on this host: a number, a list of device numbers, or ``"auto"``: the ranks that exist,
            else all accelerators, else 1 on CPU.
        parallel_devices: The devices of this host's ranks themselves.
        num_nodes: Number of hosts.
        cluster_environment: This process's place among the ranks, where no recognised launcher tells it.
        precision: Which dtype where: a name, a table of dtypes, or the part that applies it.
        collectives: How ranks talk: an object, or a name the strategy lists.
        launcher: Who brings up the ranks.
        checkpoint_io: Where checkpoints are written.
        process_group_backend: torch.distributed's backend, such as ``"gloo"``.
        timeout: How long a collective of the training step may take.
        guard_timeout: How long to wait before naming a rank that does not come.
        options: The strategy's own options, as ``shard show NAME`` lists them.

    Returns:
        The strategy.

    Raises:
        UnknownStrategy: If no installed distribution offers the name.
        AmbiguousStrategy: If two do.
        IncompatibleBackend: If the backend wants another version of ``shard-core``.
        StrategyUnavailable: If it cannot run here.
        BrokenBackend: If its plugin or class cannot be imported.
        InvalidOption: If an argument does not exist or has a wrong type or value.
        UnsupportedPrecision: If the precision is unknown or the strategy cannot honour it.

    Example:
        >>> get_strategy("single", presicion="bf16-mixed")
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: strategy 'single' has no option 'presicion'; did you mean \
'precision'? Its options are: accelerator, devices, parallel_devices, num_nodes, cluster_environment, \
precision, collectives, launcher, checkpoint_io, process_group_backend, timeout, guard_timeout.
    """
    finder = plugins.plugins()
    info = finder.find(_name(name))
    finder.check_available(info.name)
    common = [field.name for field in dataclasses.fields(RunOptions)]
    check_names(f"strategy {info.name!r}", options, [*(each.name for each in info.options), *common])
    run = RunOptions(
        accelerator=accelerator,
        devices=devices,
        parallel_devices=parallel_devices,
        num_nodes=num_nodes,
        cluster_environment=cluster_environment,
        precision=_precision(info, precision),
        collectives=collectives,
        launcher=launcher,
        checkpoint_io=checkpoint_io,
        process_group_backend=process_group_backend,
        timeout=timeout,
        guard_timeout=guard_timeout,
    )
    factory = plugins.load_object(info.factory, finder.offer(info.name).distribution)
    arguments = {field: getattr(run, field) for field in common}
    strategy: Strategy = factory(info=info, **arguments, **{**info.presets, **options})
    return strategy


def _name(name: object) -> str:
    chosen = name if name is not None else os.environ.get(_VARIABLE)
    if not chosen or not isinstance(chosen, str):
        given = "" if chosen is None else f", not {chosen!r}"
        raise InvalidOption(
            f"get_strategy needs the name of a strategy{given}: as its first argument, in the environment "
            f"variable {_VARIABLE}, or from `shard run --strategy NAME`; `shard list` shows the names."
        )
    return chosen


def _precision(info: StrategyInfo, precision: Any) -> Any:
    """Resolve a precision's name; what is not a name is left to ``RunOptions`` and the strategy."""
    if not isinstance(precision, str | int):
        return precision
    name = resolve_name(precision, others=plugins.precision_names())
    if name in info.precisions:
        return name
    make = plugins.find_precision(name)
    if make is None:
        raise UnsupportedPrecision(
            f"strategy {info.name!r} does not honour precision {name!r}; it honours: {', '.join(info.precisions)}."
        )
    return make()
