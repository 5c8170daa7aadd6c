"""The state of one torch optimizer by parameter name: read for a save, and restored by a load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

from shard_core.checkpoint.format.json_fields import shown
from shard_core.checkpoint.state.optimizer_record import KERNEL_CHOICES, OptimizerRecord
from shard_core.errors import CheckpointCorrupted, CheckpointError
from shard_core.parameters import COUNTERS, FACTORS

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from shard_core.checkpoint.state.names import NamedTensors
    from shard_core.checkpoint.state.training_state import Slot

_NAMES = frozenset({"params", "param_names"})


class OptimizerTensors:
    """One optimizer over one module's parameters.

    Args:
        owner: The user's name for the optimizer, for messages.
        optimizer: Any torch optimizer whose state hangs on its parameters.
        modules: The modules whose parameters it may step, by the user's names for them.
        zeros_like: Creates state of a parameter's layout, from it and a dtype.
        owned: Returns whether this rank keeps the state of a parameter; None if every rank does.

    Attributes:
        shapes: The full shapes of the parameters it steps, by name.
        kept: Those whose state this rank keeps, by name.

    Raises:
        CheckpointError: If it steps parameters of none of the modules, or of several.
    """

    def __init__(
        self,
        owner: str,
        optimizer: torch.optim.Optimizer,
        modules: Mapping[str, NamedTensors],
        zeros_like: Callable[[torch.Tensor, torch.dtype], torch.Tensor] | None = None,
        owned: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        self._zeros_like = zeros_like or (lambda parameter, dtype: torch.zeros_like(parameter.detach(), dtype=dtype))
        self._owner = owner
        self._optimizer = optimizer
        self.module = self._find_module(modules)
        named = modules[self.module]
        self._parameters: dict[str, torch.Tensor] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._groups: list[list[str]] = []
        for place, group in enumerate(optimizer.param_groups):
            names = []
            for parameter in group["params"]:
                name = named.name_of(parameter)
                if name is None:
                    raise CheckpointError(
                        f"optimizer {owner!r}, group {place}, steps a parameter of shape {tuple(parameter.shape)} "
                        f"that module {self.module!r} does not have; give each module an optimizer of its own."
                    )
                self._parameters[name] = parameter
                self.shapes[name] = named.shape_of(name)
                names.append(name)
            self._groups.append(names)
        self.kept = {name: each for name, each in self._parameters.items() if owned is None or owned(each)}
        self._created: dict[tuple[str, str], torch.Tensor] = {}

    @property
    def names(self) -> set[str]:
        """The names of the parameters it steps."""
        return set(self._parameters)

    def tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield (parameter's name, slot, tensor) for all state that is stored as tensors.

        Raises:
            CheckpointError: If a rank's own tensor may be a shard of the state or a copy of it.
        """
        for name, parameter in self.kept.items():
            slots = self._optimizer.state.get(parameter, {})
            tensors = {slot: value for slot, value in slots.items() if self._is_stored(name, slot, value)}
            tensors |= {slot: value for (owner, slot), value in self._created.items() if owner == name}
            for slot in sorted(tensors):
                self._refuse_unknown_layout(name, slot, tensors[slot])
                yield name, slot, tensors[slot]

    def record(self) -> OptimizerRecord:
        """Describe everything but the tensors.

        Raises:
            CheckpointError: If state that is no tensor has more than one element.
        """
        scalars: dict[str, dict[str, Any]] = {}
        for name, parameter in self.kept.items():
            for slot, value in self._optimizer.state.get(parameter, {}).items():
                if not self._is_stored(name, slot, value):
                    plain = value.to_local() if isinstance(value, DTensor) else value
                    scalars.setdefault(name, {})[slot] = plain
        groups = [
            {"params": names, **{key: value for key, value in group.items() if key not in _NAMES}}
            for names, group in zip(self._groups, self._optimizer.param_groups, strict=True)
        ]
        return OptimizerRecord(
            module=self.module,
            type=type(self._optimizer).__name__,
            defaults=sorted(set(self._optimizer.defaults) - KERNEL_CHOICES),
            groups=groups,
            scalars=scalars,
        )

    def create_slots(self, slots: Sequence[Slot]) -> None:
        """Create tensors for state that the optimizer has not created; it gets them in ``restore``."""
        self._created.clear()  # a load may begin anew, with another checkpoint in the same place
        for slot in slots:
            parameter = self.kept.get(slot.name)
            if parameter is None or slot.module != self.module or slot.parameter_shape != self.shapes[slot.name]:
                continue
            there = self._optimizer.state.get(parameter, {}).get(slot.slot)
            if self._is_stored(slot.name, slot.slot, there):
                continue
            if slot.shape == slot.parameter_shape:
                self._created[slot.name, slot.slot] = self._zeros_like(parameter, slot.dtype)
            elif isinstance(parameter, DTensor):
                self._created[slot.name, slot.slot] = _zeros_beside(parameter, slot)
            elif slot.parameter_shape == tuple(parameter.shape):
                self._created[slot.name, slot.slot] = torch.zeros(slot.shape, dtype=slot.dtype, device=parameter.device)

    @torch.no_grad()
    def check(self, records: Sequence[OptimizerRecord]) -> None:
        """Check that ``restore`` accepts what a checkpoint holds, on copies of what it would change.

        Raises:
            CheckpointCorrupted: Naming the first value that cannot be restored.
        """
        for name, parameter, scalars in self._scalars(records):
            before = self._optimizer.state.get(parameter, {})
            for slot, value in scalars.items():
                with self._refusing(f"{slot!r} of {name!r}", value):
                    self._scalar(slot, value, _copy(before.get(slot)), parameter)
        for group, source in self._sources(records):
            for key, value in source.items():
                with self._refusing(f"{key!r}", value):
                    _in_place_of(_copy(group.get(key)), value)

    @torch.no_grad()
    def restore(self, records: Sequence[OptimizerRecord], held: set[tuple[str, str]]) -> None:
        """Restore everything but the elements of tensors.

        Args:
            records: The checkpoint's records of this module's optimizers.
            held: The (parameter's name, slot) of the tensors it holds; others are dropped.
        """
        for name, parameter, scalars in self._scalars(records):
            self._restore_parameter(name, parameter, scalars, held)
        for group, source in self._sources(records):
            for key, value in source.items():
                group[key] = _in_place_of(group.get(key), value)

    def _scalars(self, records: Sequence[OptimizerRecord]) -> Iterator[tuple[str, torch.Tensor, Mapping[str, Any]]]:
        """Yield each parameter that is restored, its name first and what the checkpoint has of its scalars last."""
        scalars = {
            name: record.scalars.get(name, {})
            for record in records
            for name in record.names
            if name not in record.left_out
        }
        for name, parameter in self.kept.items():
            if name in scalars:
                yield name, parameter, scalars[name]

    def _sources(self, records: Sequence[OptimizerRecord]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield each group and the hyper-parameters that it gets."""
        saved = {name: group for record in records for group in record.groups for name in group["params"]}
        empty = self._empty_groups(records)
        for place, (names, group) in enumerate(zip(self._groups, self._optimizer.param_groups, strict=True)):
            source = next((saved[name] for name in names if name in saved), {} if names else empty.get(place, {}))
            yield group, {key: value for key, value in source.items() if key not in _NAMES | KERNEL_CHOICES}

    def _empty_groups(self, records: Sequence[OptimizerRecord]) -> dict[int, Mapping[str, Any]]:
        """Return by place the groups without parameters that the checkpoint has of this optimizer, if as many."""
        own = {name for names in self._groups for name in names}
        like = [each for each in records if len(each.groups) == len(self._groups) and own.intersection(each.names)]
        groups = enumerate(like[0].groups) if len(like) == 1 else ()
        return {place: group for place, group in groups if not group["params"]}

    @contextlib.contextmanager
    def _refusing(self, what: str, value: Any) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise CheckpointCorrupted(
                f"optimizer {self._owner!r} cannot take {shown(value)} for {what}, which the checkpoint says it is: "
                f"{error}; nothing was changed, use another checkpoint."
            ) from error

    def _restore_parameter(
        self, name: str, parameter: torch.Tensor, scalars: Mapping[str, Any], held: set[tuple[str, str]]
    ) -> None:
        before = self._optimizer.state.get(parameter, {})
        after = {slot: self._scalar(slot, value, before.get(slot), parameter) for slot, value in scalars.items()}
        after |= {slot: value for slot, value in before.items() if (name, slot) in held and slot not in scalars}
        after |= {slot: tensor for (owner, slot), tensor in self._created.items() if owner == name}
        self._optimizer.state.pop(parameter, None)
        if after:
            self._optimizer.state[parameter] = after

    def _scalar(self, slot: str, value: Any, before: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor):
            counts = isinstance(before, torch.Tensor) and isinstance(value, bool | int | float)
            return before.fill_(value) if counts else value
        if isinstance(before, torch.Tensor) and before.dtype == value.dtype and not isinstance(before, DTensor):
            return before.copy_(value)
        # As torch's optimizers do: fused and capturable kernels want counters beside the parameter.
        group = next(g for g in self._optimizer.param_groups if any(p is parameter for p in g["params"]))
        beside = slot in FACTORS or bool(group.get("fused") or group.get("capturable"))
        return value.to(parameter.device) if beside else value.clone()

    def _is_stored(self, name: str, slot: str, value: Any) -> bool:
        """Return whether state is stored as a tensor, by full shapes alone: every layout comes to the same answer."""
        return isinstance(value, torch.Tensor) and (value.dim() > 0 or (not self.shapes[name] and slot not in COUNTERS))

    def _refuse_unknown_layout(self, name: str, slot: str, value: torch.Tensor) -> None:
        parameter = self._parameters[name]
        if isinstance(value, DTensor) or not isinstance(parameter, DTensor):
            return
        if not all(isinstance(placement, Replicate) for placement in parameter.placements):
            raise CheckpointError(
                f"optimizer {self._owner!r} keeps {slot!r} of {name!r} as a plain tensor, and the parameter is divided "
                "among ranks, so it may be a shard or a copy; let the optimizer keep it as a DTensor."
            )

    def _find_module(self, modules: Mapping[str, NamedTensors]) -> str:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                for name, tensors in modules.items():
                    if tensors.name_of(parameter) is not None:
                        return name
        raise CheckpointError(
            f"optimizer {self._owner!r} steps no parameter of any module in the state; put its module in too, and set "
            "both up together."
        )


def _zeros_beside(parameter: DTensor, slot: Slot) -> DTensor:
    """Create state of another shape than its parameter: sharded where it is as long as that, else replicated."""

    def follows(placement: Placement) -> bool:
        if type(placement) is not Shard or len(slot.shape) != parameter.dim():
            return False
        return slot.shape[placement.dim] == parameter.shape[placement.dim]

    placements = [placement if follows(placement) else Replicate() for placement in parameter.placements]
    return zeros(slot.shape, dtype=slot.dtype, device_mesh=parameter.device_mesh, placements=placements)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _in_place_of(before: Any, value: Any) -> Any:
    """Return a checkpoint's value as the kind a hyper-parameter had: tensors stay the same tensors."""
    if isinstance(before, torch.Tensor):
        return before.fill_(value.item() if isinstance(value, torch.Tensor) else value)  # which refuses what overflows
    if isinstance(value, torch.Tensor) and isinstance(before, int | float):
        return value.item()
    return value
