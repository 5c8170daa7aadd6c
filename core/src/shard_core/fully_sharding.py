"""Sharding modules over data-parallel ranks with torch's ``fully_shard`` (FSDP2), for every engine that does."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FSDPModule, fully_shard

from shard_core.entries import Entries
from shard_core.errors import SetupError
from shard_core.inference_mode import NoInferenceMode
from shard_core.initialization.materialize import Materializer, unset_parameters
from shard_core.initialization.meta import initialise, needs_values
from shard_core.initialization.recording import Recording, record
from shard_core.parameters import plain_name
from shard_core.precision.dtypes import dtype_named
from shard_core.replicas import AveragedGradients, send_values
from shard_core.units import Unit, find_units, num_bytes

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from shard_core.collectives.interface import Collectives
    from shard_core.parameters import ParameterNames
    from shard_core.precision.interface import PrecisionPolicy

log = logging.getLogger(__name__)


class FullySharding:
    """Shards modules unit by unit and never holds one of them whole.

    A strategy holds one per run. Order of calls: ``recording`` around construction, ``shard``, then
    ``deferred`` around backwards whose gradients need not travel yet, ``reshard`` before shards are read.

    Args:
        mesh: The data-parallel ranks, one axis.
        collectives: What all ranks talk through.
        unit_bytes: Neighbouring blocks share one message until it carries this many bytes of parameters.
        reshard_after_forward: Whether whole parameters are freed between forward and backward; None
            does so for all but the root's.
        units: Which submodules share one message, if not by bytes.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        collectives: Collectives,
        *,
        unit_bytes: int,
        reshard_after_forward: bool | None,
        units: Callable[[torch.nn.Module], Sequence[Unit]] | None = None,
    ) -> None:
        self._mesh = mesh
        self._collectives = collectives
        self._units = units or functools.partial(find_units, unit_bytes=unit_bytes)
        self._reshard_after_forward = reshard_after_forward
        self._replicas: weakref.WeakKeyDictionary[torch.nn.Module, AveragedGradients] = weakref.WeakKeyDictionary()
        self._recording: Recording | None = None
        self._leaves_parameters = False

    @contextlib.contextmanager
    def recording(self, empty_init: bool) -> Iterator[None]:
        """Note what constructors do instead of doing it; ``shard`` replays it shard by shard.

        Args:
            empty_init: Whether parameters wait for a checkpoint instead.
        """
        with record(self._collectives, after=self._recording) as recording:
            yield
        self._recording = recording
        self._leaves_parameters = empty_init

    def shard(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        names: ParameterNames,
        *,
        policy: PrecisionPolicy,
        device: torch.device,
        lay_out: Callable[[torch.nn.Module], None] | None = None,
        whole: Collection[torch.nn.Parameter] = (),
        param_init_fn: Callable[[torch.nn.Module], object] | None = None,
    ) -> Sequence[Unit]:
        """Shard a module in place and point its optimizers at the shards.

        Args:
            module: The user's module.
            optimizers: Over its parameters as they are.
            names: The names these have.
            policy: Which dtypes recorded tensors get.
            device: Where this rank's shards live.
            lay_out: Lays parameters out along other axes before they are sharded; recorded ones are on
                the meta device then.
            whole: Parameters of the module that every rank keeps whole; their gradients are averaged all the same.
            param_init_fn: Initialises what a submodule has on the meta device.

        Returns:
            The units that were formed, without the root's.

        Raises:
            SetupError: If a tensor has no values and nothing that gives it some.
        """
        kept = {names.of(parameter) for parameter in whole}
        if needs_values(module, self._collectives):
            initialise(module, param_init_fn, self.recording(empty_init=False))
        send_values(module)
        values = Materializer(module, dtype_named(policy.parameter), dtype_named(policy.buffer))
        if lay_out is not None:
            lay_out(module)
        units = self._units(module)
        self._shard(module, units, kept)
        values.allocate(device)
        for parameter in _whole(module, kept):
            parameter.data = parameter.data.to(device)
        values.set_aside(optimizers)
        names.repoint(optimizers, module)
        values.fill(parameters=not self._leaves_parameters)
        if self._leaves_parameters:
            self._refuse_unset(module)
        self._replicas[module] = AveragedGradients(_whole(module, kept))
        Entries(module, units)
        NoInferenceMode(module)
        return units

    @contextlib.contextmanager
    def deferred(self, module: torch.nn.Module) -> Iterator[None]:
        """Let whole gradients add up on this rank.

        Args:
            module: One that was sharded.
        """
        assert isinstance(module, FSDPModule)
        module.set_requires_gradient_sync(False)
        self._replicas[module].deferred = True
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)
            self._replicas[module].deferred = False

    def reshard(self, modules: Iterable[torch.nn.Module]) -> None:
        """Free whole parameters: after a forward without backward, a unit may still show them.

        Args:
            modules: Ones that were sharded.
        """
        for module in modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def _shard(self, module: torch.nn.Module, units: Sequence[Unit], kept: Collection[str]) -> None:
        shard = functools.partial(
            fully_shard,
            mesh=self._mesh,
            reshard_after_forward=self._reshard_after_forward,
            ignored_params=set(_whole(module, kept)),
        )
        for unit in units:
            shard(list(unit.modules))
        shard(module)
        _tell(module, units, self._mesh.size())

    def _refuse_unset(self, module: torch.nn.Module) -> None:
        """Let the first forward make sure that a checkpoint has filled every parameter."""

        def check(called: torch.nn.Module, args: Any) -> None:
            del args
            unset = self._collectives.gather_objects(unset_parameters(called))
            names = sorted({name for names in unset for name in names})
            if names:
                raise SetupError(
                    f"{len(names)} parameters were built with empty_init=True and never filled, first {names[0]!r}; "
                    "call load_checkpoint() before the first forward."
                )
            handle.remove()

        handle = module.register_forward_pre_hook(check, prepend=True)


def _whole(module: torch.nn.Module, kept: Collection[str]) -> list[torch.nn.Parameter]:
    """List the parameters that are not sharded: those asked for, and those without a dimension to shard."""
    return [p for name, p in module.named_parameters() if p.dim() == 0 or plain_name(name) in kept]


def _tell(module: torch.nn.Module, units: Sequence[Unit], ranks: int) -> None:
    """Log what was sharded together."""
    total, told = num_bytes(module), 0
    for number, unit in enumerate(units):
        # A unit does not hold what units inside it hold.
        upto = num_bytes(*(part for each in units[: number + 1] for part in each.modules))
        log.info("unit %s: %.1f MiB", ", ".join(unit.names), (upto - told) / 2**20)
        told = upto
    log.info("root unit: %.1f of %.1f MiB, over %d ranks", (total - told) / 2**20, total / 2**20, ranks)
