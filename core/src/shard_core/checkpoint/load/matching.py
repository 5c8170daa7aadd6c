"""Matching names: which tensor of a checkpoint belongs to which of the live state (``mismatch`` checks them)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.dtypes import torch_dtype
from shard_core.checkpoint.format.json_fields import Fields
from shard_core.checkpoint.keys import MODEL, OPTIMIZER, frozen_keys, slot_in
from shard_core.checkpoint.state.optimizer_record import OptimizerRecord
from shard_core.checkpoint.state.training_state import KeySpace, Slot
from shard_core.parameters import COUNTERS

if TYPE_CHECKING:
    import torch

    from shard_core.checkpoint.format.manifest import Manifest


class ModuleMatch:
    """One live module and the module of the checkpoint that is loaded into it.

    Args:
        live: The user's name for the live module.
        saved: The name it was saved under.
        live_prefix: What stands before its tensors' names in live keys.
        manifest: The checkpoint.
        live_aliases: The live state's aliases.
    """

    def __init__(
        self, live: str, saved: str, live_prefix: str, manifest: Manifest, live_aliases: Mapping[str, str]
    ) -> None:
        self.live, self.saved = live, saved
        prefix = manifest.modules[saved]
        self._live_model, self._live_optim = f"{MODEL}{live_prefix}", f"{OPTIMIZER}{live_prefix}"
        self.saved_model, self.saved_optim = f"{MODEL}{prefix}", f"{OPTIMIZER}{prefix}"
        self._live_aliases = _inside(self._live_model, live_aliases)
        self._saved_aliases = _inside(self.saved_model, manifest.aliases)
        self._tensors = {tensor.key: tensor for tensor in manifest.tensors}
        self._left_out = frozen_keys(manifest.values)

    def owns(self, key: str) -> bool:
        """Return whether a live key is one of this module's."""
        return key.startswith((self._live_model, self._live_optim))

    def stored_key(self, key: str) -> str | None:
        """Return the checkpoint's key for a live key; None if it holds no such tensor."""
        if key.startswith(self._live_model):
            name = self._stored_name(key.removeprefix(self._live_model))
            return None if name is None else self.saved_model + name
        name, slot = slot_in(key, self._live_optim)
        stored = f"{self.saved_optim}{self._stored_name(name)}.{slot}"
        return stored if stored in self._tensors else None

    def was_left_out(self, key: str) -> bool:
        """Return whether the save has left out the tensor of a live key because it was frozen."""
        names = self._names_of(key.removeprefix(self._live_model))
        return any(self.saved_model + name in self._left_out for name in names)

    def called(self, key: str, *, live: bool = True) -> str:
        """Return the name of a tensor for messages, by the user's own key for its module.

        Args:
            key: The tensor's.
            live: Whether it is a live key, rather than one of the checkpoint's.
        """
        model, optim = (self._live_model, self._live_optim) if live else (self.saved_model, self.saved_optim)
        if key.startswith(model):
            return repr(f"{self.live}.{key.removeprefix(model)}")
        name, slot = slot_in(key, optim)
        return f"the optimizer's {slot!r} of {f'{self.live}.{name}'!r}"

    def parameter_of(self, key: str) -> str:
        """Return the name, in a live key, of the tensor or of the parameter whose state it is."""
        if key.startswith(self._live_model):
            return key.removeprefix(self._live_model)
        return slot_in(key, self._live_optim)[0]

    def tied_here(self, stored_key: str) -> str | None:
        """Return the live name that a stored tensor is tied to, if that is why nothing asks for it."""
        return self._live_aliases.get(stored_key.removeprefix(self.saved_model))

    def live_names(self, name: str) -> list[str]:
        """Return the names that a stored parameter may have here."""
        names = [name, *(alias for alias, first in self._saved_aliases.items() if first == name)]
        return list(dict.fromkeys(self._live_aliases.get(each, each) for each in names))

    def slots(self, dtypes: Mapping[str, torch.dtype]) -> Iterator[Slot]:
        """List the checkpoint's optimizer state under live names.

        Args:
            dtypes: Those of live tensors that the checkpoint's are cast to; state that has its parameter's is cast too.
        """
        for key, tensor in self._tensors.items():
            name, slot = slot_in(key, self.saved_optim)
            parameter = self._tensors.get(self.saved_model + name)
            if key.startswith(self.saved_optim) and parameter is not None:
                as_stored = torch_dtype(tensor.dtype)
                follows = tensor.dtype == parameter.dtype and slot not in COUNTERS
                for live in self.live_names(name):
                    yield Slot(
                        module=self.live,
                        name=live,
                        slot=slot,
                        dtype=dtypes.get(self._live_model + live, as_stored) if follows else as_stored,
                        shape=tensor.shape,
                        parameter_shape=parameter.shape,
                    )

    def renamed(self, record: OptimizerRecord) -> OptimizerRecord:
        """Return an optimizer of the checkpoint with the live names."""
        groups = [
            {**group, "params": [live for name in group["params"] for live in self.live_names(name)]}
            for group in record.groups
        ]
        scalars = {live: slots for name, slots in record.scalars.items() for live in self.live_names(name)}
        renamed = dataclasses.replace(record, module=self.live, groups=groups, scalars=scalars)
        left_out = (name for name in renamed.names if self.was_left_out(self._live_model + name))
        return dataclasses.replace(renamed, left_out=frozenset(left_out))

    def _stored_name(self, name: str) -> str | None:
        for each in self._names_of(name):
            stored = self._saved_aliases.get(each, each)
            if self.saved_model + stored in self._tensors:
                return stored
        return None

    def _names_of(self, name: str) -> list[str]:
        """Return the live name of a tensor and those that are tied to it."""
        return [name, *(alias for alias, first in self._live_aliases.items() if first == name)]


def match_modules(manifest: Manifest, modules: Sequence[str], aliases: Mapping[str, str]) -> dict[str, ModuleMatch]:
    """Match each live module to one of the checkpoint: by name, or the only one for the only one.

    Args:
        manifest: The checkpoint.
        modules: The user's names for the live modules.
        aliases: The live state's aliases.

    Returns:
        The matches by live name; modules without one are left out.
    """
    prefixes = KeySpace(modules).prefixes
    matches = {}
    for live in modules:
        only = len(modules) == 1 and len(manifest.modules) == 1
        saved = next(iter(manifest.modules)) if only else live
        if saved in manifest.modules:
            matches[live] = ModuleMatch(live, saved, prefixes[live], manifest, aliases)
    return matches


def saved_optimizers(manifest: Manifest) -> dict[str, OptimizerRecord]:
    """Decode the optimizers of a checkpoint."""
    return {
        name: OptimizerRecord.from_json(Fields(content, f"optimizer {name!r} in the manifest"))
        for name, content in manifest.optimizers.items()
    }


def _inside(prefix: str, aliases: Mapping[str, Any]) -> dict[str, str]:
    return {
        alias.removeprefix(prefix): key.removeprefix(prefix)
        for alias, key in aliases.items()
        if alias.startswith(prefix)
    }
