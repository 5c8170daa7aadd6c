"""An optimizer without its tensors: groups by parameter name, hyper-parameters, per-parameter scalars."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.values import decode, encode, encode_scalar, no_tensor
from shard_core.errors import CheckpointCorrupted

if TYPE_CHECKING:
    from shard_core.checkpoint.format.json_fields import Fields

#: How an optimizer computes, not what: saved, never restored.
KERNEL_CHOICES = frozenset({"capturable", "differentiable", "foreach", "fused"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerRecord:
    """What must be known of one optimizer besides the tensors of its state.

    Attributes:
        module: The user's name for the module whose parameters it steps.
        type: Its class's name, for messages.
        defaults: The hyper-parameters it cannot do without; groups may hold more, from schedulers.
        groups: Each group's hyper-parameters, and under ``params`` its parameters' names.
        scalars: State of one element (``step``, say), by parameter and slot: tensors without dims, or
            plain values.
        left_out: The names of parameters that a save has left out, because they were frozen, with their state: a load
            leaves both as they are. Of a load alone; no record on disk has it.
    """

    module: str
    type: str
    defaults: Sequence[str]
    groups: Sequence[Mapping[str, Any]]
    scalars: Mapping[str, Mapping[str, Any]]
    left_out: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        """The names of all its parameters."""
        return [name for group in self.groups for name in group["params"]]

    def to_json(self, key: str) -> dict[str, Any]:
        """Describe it in JSON values.

        Args:
            key: The user's name for it, for messages.

        Raises:
            CheckpointError: Naming a hyper-parameter or a state that JSON cannot hold.
        """
        owner = f"{key}[{self.type}]"
        return {
            "module": self.module,
            "type": self.type,
            "defaults": list(self.defaults),
            "groups": encode([dict(group) for group in self.groups], f"{owner}.param_groups", encode_scalar),
            "scalars": encode(
                {name: dict(slots) for name, slots in self.scalars.items()}, f"{owner}.state", encode_scalar
            ),
        }

    @classmethod
    def from_json(cls, fields: Fields) -> OptimizerRecord:
        """Decode what ``to_json`` returned.

        Raises:
            CheckpointCorrupted: If it returns no such thing.
        """
        groups = decode(fields.items("groups"), no_tensor)
        scalars = decode(fields.mapping("scalars"), no_tensor)
        if not all(isinstance(group, dict) and _are_texts(group.get("params")) for group in groups):
            raise CheckpointCorrupted("the manifest holds an optimizer group without its parameters' names.")
        if not isinstance(scalars, dict) or not all(isinstance(slots, dict) for slots in scalars.values()):
            raise CheckpointCorrupted("the manifest holds optimizer scalars that belong to no parameter.")
        defaults = fields.items("defaults")
        if not _are_texts(defaults):
            raise CheckpointCorrupted("the manifest holds an optimizer whose hyper-parameters have no names.")
        return cls(
            module=fields.text("module"),
            type=fields.text("type"),
            defaults=defaults,
            groups=groups,
            scalars=scalars,
        )


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
