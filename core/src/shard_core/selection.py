"""Choosing a strategy by name: find it, check everything that can be checked without torch, build it."""

from __future__ import annotations

import contextlib
import os
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from shard_core import plugins
from shard_core.capability import Capability
from shard_core.errors import InvalidOption, MissingCapability, UnsupportedFloat16, UnsupportedPrecision
from shard_core.options import (
    OF_THE_LOOP,
    OPTIONS_VARIABLE,
    check_names,
    environment_options,
    import_references,
    options_of,
)
from shard_core.precision.interface import Precision, PrecisionPolicy
from shard_core.precision.policies import POLICIES, resolve_name
from shard_core.run_options import RunOptions

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from shard_core.collectives.interface import Collectives
    from shard_core.launcher.interface import Launcher, ProcessInfo
    from shard_core.plugins.info import StrategyInfo
    from shard_core.strategy import Strategy

_VARIABLE = "SHARD_STRATEGY"

#: Options that only strategies with a certain capability have, under the same name everywhere.
_OPTIONS_OF_CAPABILITIES = {"cpu_offload": Capability.CPU_OFFLOAD}

#: Options that are durations, for which JSON has numbers of seconds.
_SECONDS = {"timeout", "guard_timeout"}


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
    """Find the strategy of a name, check its options, and build it; nothing is started yet.

    Options that are left at their defaults are those of ``SHARD_OPTIONS``, a JSON object by their names, if it has
    them. Durations are seconds there, and classes and functions ``"package.module:name"``, which is imported.

    Args:
        name: The strategy's name, as ``shard list`` shows it; else the value of ``SHARD_STRATEGY``.
        accelerator: Device type: ``"auto"``, ``"cpu"``, ``"cuda"`` (``"gpu"``), ``"xla"``, ``"tpu"`` (``"xla"``
            on TPUs alone).
        devices: Ranks on this host: a number, a list of device numbers, or ``"auto"``: the ranks that exist,
            else all accelerators, else 1 on CPU.
        parallel_devices: The devices of this host's ranks themselves, instead of the two.
        num_nodes: Number of hosts.
        cluster_environment: This process's place among the ranks, where no recognised launcher sets it.
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
        MissingCapability: If an option belongs to a capability the strategy does not promise.
        UnsupportedPrecision: If the precision is unknown or the strategy cannot honour it. Where that is
            because it does not promise ``FP16``, this is an ``UnsupportedFloat16``, which is a
            ``MissingCapability`` as well.

    Example:
        >>> get_strategy("single", presicion="bf16-mixed")
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: strategy 'single' has no option 'presicion'; did you mean \
'precision'? Its options are: activation_checkpointing, activation_offload, compile, accelerator, devices, \
parallel_devices, num_nodes, cluster_environment, precision, collectives, launcher, checkpoint_io, \
process_group_backend, timeout, guard_timeout.
    """
    finder = plugins.plugins()
    info = finder.find(_name(name))
    finder.check_available(info.name)
    check_options(info, options)
    asked: dict[str, Any] = {
        "accelerator": accelerator,
        "devices": devices,
        "parallel_devices": parallel_devices,
        "num_nodes": num_nodes,
        "cluster_environment": cluster_environment,
        "precision": precision,
        "collectives": collectives,
        "launcher": launcher,
        "checkpoint_io": checkpoint_io,
        "process_group_backend": process_group_backend,
        "timeout": timeout,
        "guard_timeout": guard_timeout,
    }
    defaults = {option.name: option.default for option in options_of(RunOptions)}
    given = {**{key: value for key, value in asked.items() if value != defaults[key]}, **options}
    chosen = {**_outside(info, given), **given}
    common = {key: chosen.pop(key, default) for key, default in defaults.items()}
    run = RunOptions(**{**common, "precision": _precision(info, common["precision"])})
    factory = plugins.load_object(info.factory, finder.offer(info.name).distribution)
    arguments = {key: getattr(run, key) for key in common}
    strategy: Strategy = factory(info=info, **arguments, **{**info.presets, **chosen})
    return strategy


def check_options(info: StrategyInfo, options: Mapping[str, Any], source: str = "") -> None:
    """Refuse options that a strategy does not have, or that belong to a capability it does not promise.

    Args:
        info: The strategy's card.
        options: The options; their values do not count.
        source: Where they come from if not from the call, for the message.

    Raises:
        InvalidOption: If an option is unknown.
        MissingCapability: If it belongs to a capability that is not promised.
    """
    _check_capabilities(info, options)
    allowed = [each.name for each in (*info.options, *options_of(RunOptions))]
    check_names(f"{source}strategy {info.name!r}", options, allowed, {**OF_THE_LOOP, **info.refused})


def _outside(info: StrategyInfo, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``SHARD_OPTIONS`` that the call leaves open."""
    outside = environment_options()
    check_options(info, outside, f"{OPTIONS_VARIABLE}: ")
    for name in outside.keys() & given.keys():
        value = outside.pop(name)
        if value != given[name]:
            warnings.warn(
                f"{name}={value!r} of {OPTIONS_VARIABLE} is not used: the call of get_strategy gives {given[name]!r}.",
                stacklevel=3,
            )
    for name in outside.keys() & _SECONDS:
        if isinstance(outside[name], int | float) and not isinstance(outside[name], bool):
            with contextlib.suppress(ValueError, OverflowError):  # which is refused with the other values
                outside[name] = timedelta(seconds=outside[name])
    return import_references(outside, {each.name: each.type for each in info.options})


def _name(name: object) -> str:
    chosen = name if name is not None else os.environ.get(_VARIABLE)
    if not chosen or not isinstance(chosen, str):
        given = "" if chosen is None else f", not {chosen!r}"
        raise InvalidOption(
            f"get_strategy needs the name of a strategy{given}: as its first argument, in the environment "
            f"variable {_VARIABLE}, or from `shard run --strategy NAME`; `shard list` shows the names."
        )
    return chosen


def _check_capabilities(info: StrategyInfo, options: Mapping[str, Any]) -> None:
    for option, capability in _OPTIONS_OF_CAPABILITIES.items():
        if option in options and capability not in info.capabilities:
            others = [each.name for each in plugins.installed() if each.info and capability in each.info.capabilities]
            raise MissingCapability(
                f"strategy {info.name!r} does not promise {capability.name}: it is not one that {capability.value}; "
                f"leave {option} out. Of the installed strategies {', '.join(others) or 'none'} can."
            )


def _precision(info: StrategyInfo, precision: Any) -> Any:
    """Resolve a precision's name; what is not a name is left to ``RunOptions`` and the strategy."""
    if not isinstance(precision, str | int):
        _check_float16(info, precision.policy if isinstance(precision, Precision) else precision)
        return precision
    name = resolve_name(precision, others=plugins.precision_names())
    _check_float16(info, POLICIES.get(name))
    if name in info.precisions:
        return name
    make = plugins.find_precision(name)
    if make is None:
        raise UnsupportedPrecision(
            f"strategy {info.name!r} does not honour precision {name!r}; it honours: {', '.join(info.precisions)}."
        )
    return make()


def _check_float16(info: StrategyInfo, policy: object) -> None:
    if not isinstance(policy, PrecisionPolicy) or policy.compute != "float16":
        return
    if Capability.FP16 not in info.capabilities:
        honoured = [name for name in info.precisions if name != policy.name]
        raise UnsupportedFloat16(
            f"strategy {info.name!r} does not honour precision {policy.name!r}; it honours: {', '.join(honoured)}. "
            "Whatever computes in float16 needs FP16, which it does not promise."
        )
