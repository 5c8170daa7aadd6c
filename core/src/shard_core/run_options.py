"""The options of a run that every strategy takes, declared once: where, on how many ranks, in which dtype."""

from __future__ import annotations

import contextlib
import dataclasses
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

from shard_core.collectives.interface import Collectives
from shard_core.errors import InvalidOption, nearest
from shard_core.launcher.interface import Launcher, ProcessInfo
from shard_core.options import option
from shard_core.precision.interface import Precision, PrecisionPolicy
from shard_core.precision.policies import resolve_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_ACCELERATORS = {"auto": "auto", "cpu": "cpu", "cuda": "cuda", "gpu": "cuda", "xla": "xla", "tpu": "tpu"}

#: The type of device that torch knows an accelerator by, if it has another name.
_DEVICE_TYPES = {"auto": None, "tpu": "xla"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The arguments every strategy takes, checked and brought to one spelling on construction.

    Raises:
        InvalidOption: If an argument has a type or a value that is not allowed.
        UnsupportedPrecision: If there is no precision of that name.

    Example:
        >>> run = RunOptions(accelerator="gpu", devices="2", precision="bf16")
        >>> run.accelerator, run.devices, run.precision
        ('cuda', 2, 'bf16-mixed')
        >>> RunOptions(devices=0)
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: devices is 0; allowed are 'auto', a number from 1 up, or a list of \
device numbers such as [0, 1].
    """

    accelerator: str = option("auto", "device type: auto, cpu, cuda (or gpu), xla, or tpu: xla on TPUs alone")
    devices: int | str | Sequence[int] = option(
        "auto",
        "ranks on this host: a number, a list of device numbers, or auto: the ranks that exist, "
        "else all accelerators, else 1 on CPU",
    )
    parallel_devices: Sequence[torch.device] | None = option(
        None, "the devices of this host's ranks themselves, instead of accelerator and devices"
    )
    num_nodes: int = option(1, "number of hosts")
    cluster_environment: ProcessInfo | None = option(
        None, "this process's place among the ranks, where no launcher that is recognised sets it"
    )
    precision: str | int | PrecisionPolicy | Precision = option(
        "32-true", "which dtype where: a name, a table of dtypes, or the part that applies it"
    )
    collectives: str | Collectives | None = option(
        None, "how ranks talk: an object, or a name the strategy lists; None for the strategy's own"
    )
    launcher: Launcher | None = option(
        None, "who brings up the ranks; None joins those that exist, else starts them on this host"
    )
    checkpoint_io: Any = option(None, "where checkpoints are written; None for local or shared disk")
    process_group_backend: str | None = option(
        None, "torch.distributed's backend, such as gloo or nccl; None for the one that fits the device"
    )
    timeout: timedelta = option(timedelta(minutes=30), "how long a collective of the training step may take")
    guard_timeout: timedelta = option(
        timedelta(seconds=60),
        "how long to wait before naming a rank that does not come to setup, save, load or barrier",
    )

    def __post_init__(self) -> None:
        """Check every argument and replace the short spellings."""
        set_field = object.__setattr__
        set_field(self, "accelerator", _accelerator(self.accelerator))
        set_field(self, "devices", _devices(self.devices))
        if not _is_count(self.num_nodes):
            raise InvalidOption(f"num_nodes is {self.num_nodes!r}; it must be a whole number from 1 up.")
        if isinstance(self.precision, str | int):
            set_field(self, "precision", resolve_name(self.precision))
        for name, allowed in _TYPES.items():
            _check_type(name, getattr(self, name), allowed)
        if self.parallel_devices is not None:
            set_field(
                self, "parallel_devices", _parallel_devices(self.parallel_devices, self.accelerator, self.devices)
            )
        for name in ("timeout", "guard_timeout"):
            if getattr(self, name) <= timedelta(0):
                raise InvalidOption(f"{name} is {getattr(self, name)!r}; it must be longer than nothing.")

    @property
    def device_type(self) -> str | None:
        """The type of device asked for; None for the one that is there."""
        if self.parallel_devices is not None:
            return self.parallel_devices[0].type
        return _DEVICE_TYPES.get(self.accelerator, self.accelerator)


_TYPES: dict[str, tuple[type, ...]] = {
    "parallel_devices": (list, tuple, type(None)),
    "cluster_environment": (ProcessInfo, type(None)),
    "precision": (str, PrecisionPolicy, Precision),
    "collectives": (str, Collectives, type(None)),
    "launcher": (Launcher, type(None)),
    "process_group_backend": (str, type(None)),
    "timeout": (timedelta,),
    "guard_timeout": (timedelta,),
}


def _check_type(name: str, value: object, allowed: tuple[type, ...]) -> None:
    if not isinstance(value, allowed):
        listed = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
        raise InvalidOption(f"{name} is {value!r}, of type {type(value).__name__}; it must be {listed}.")


def _accelerator(value: object) -> str:
    if not isinstance(value, str) or value not in _ACCELERATORS:
        hint = nearest(str(value), _ACCELERATORS)
        raise InvalidOption(f"accelerator is {value!r}{hint or ';'} allowed are: {', '.join(_ACCELERATORS)}.")
    return _ACCELERATORS[value]


def _devices(value: object) -> int | str | tuple[int, ...]:
    if value == "auto":
        return "auto"
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value
    if _is_count(number):
        return number
    if isinstance(value, list | tuple) and value and all(type(each) is int and each >= 0 for each in value):
        if len(set(value)) < len(value):
            raise InvalidOption(f"devices is {value!r}, which names one twice; every rank needs its own.")
        return tuple(value)
    raise InvalidOption(
        f"devices is {value!r}; allowed are 'auto', a number from 1 up, or a list of device numbers such as [0, 1]."
    )


def _parallel_devices(
    given: Sequence[object], accelerator: str, devices: int | str | Sequence[int]
) -> tuple[torch.device, ...]:
    """Return the devices, which agree with one another and with the other options."""
    if not given:
        raise InvalidOption("parallel_devices is empty; give one device per rank on this host, or None.")
    found = tuple(_device(each) for each in given)
    types = list(dict.fromkeys(device.type for device in found))
    if len(types) > 1:
        raise InvalidOption(
            f"parallel_devices names devices of several types, {' and '.join(types)}; all ranks of a strategy have one "
            "type."
        )
    if _DEVICE_TYPES.get(accelerator, accelerator) not in (None, *types):
        raise InvalidOption(
            f"parallel_devices names {types[0]} devices, but accelerator is {accelerator!r}; leave accelerator out."
        )
    numbers = tuple(device.index for device in found)
    agreeing = ("auto", len(found), numbers, tuple(range(len(found))) if None in numbers else numbers)
    if devices not in agreeing:
        named = f"{len(found)} devices" if isinstance(devices, int) else ", ".join(map(str, found))
        asked = devices if isinstance(devices, int) else list(devices)
        raise InvalidOption(f"parallel_devices names {named}, but devices is {asked}; leave devices out.")
    return found


def _device(value: object) -> torch.device:
    import torch

    wrong = f"of type {type(value).__name__}"
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        with contextlib.suppress(RuntimeError):
            return torch.device(value)
        wrong = "which torch knows no device by"
    raise InvalidOption(
        f"parallel_devices has {value!r}, {wrong}; give devices such as torch.device('cuda', 0), or devices=[0]."
    )


def _is_count(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number from 1 up; ``True`` is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
