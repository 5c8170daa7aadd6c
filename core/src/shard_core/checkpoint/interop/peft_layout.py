"""PEFT's own folder of adapters: which tensors of a model are in it, and what they are called there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from shard_core.errors import CheckpointCorrupted, InvalidOption, nearest

if TYPE_CHECKING:
    from shard_core.checkpoint.storage.interface import Folder

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"

#: What stands before every name in PEFT's files, whether or not the model is wrapped.
_WRAPPED = "base_model.model."
_KIND = "LORA"
#: What the attributes of a layer begin with that hold its adapters by their names.
_ATTRIBUTES = "lora_"
_WHOLE_LAYERS = "modules_to_save"
#: An attribute of a layer that PEFT's files leave the last part of its name out for.
_MAGNITUDE = "lora_magnitude_vector"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterConfiguration:
    """The configuration of PEFT's adapters.

    Attributes:
        content: What stands in ``adapter_config.json``.
        path: Where it was read, for messages.
    """

    content: dict[str, Any]
    path: str

    @classmethod
    def find(cls, path: Path) -> Self | None:
        """Read it from the folder that has it, or from a file that is one; None if neither is so.

        Raises:
            InvalidOption: If the folder has a model's configuration too.
        """
        file = path / ADAPTER_CONFIG_NAME if path.is_dir() else path
        if not file.is_file():
            return None
        if path.is_dir() and (path / "config.json").is_file():
            raise InvalidOption(
                f"{str(path)!r} holds the configuration of a model and of adapters; give the path of the one that is "
                "meant."
            )
        content = _json(file)
        return cls(content=content, path=str(file)) if isinstance(content, dict) and "peft_type" in content else None

    @classmethod
    def beside(cls, weights: Path) -> Self | None:
        """Read it from the folder of a file of adapters; None if it is no such file.

        Raises:
            CheckpointCorrupted: If it is no configuration.
        """
        file = weights.with_name(ADAPTER_CONFIG_NAME)
        if not weights.is_file() or weights.name != ADAPTER_WEIGHTS_NAME or not file.is_file():
            return None
        content = _json(file)
        if not isinstance(content, dict) or not isinstance(content.get("peft_type"), str):
            raise CheckpointCorrupted(f"{str(file)!r} is no configuration of adapters; it names no 'peft_type'.")
        return cls(content=content, path=str(file))

    def names(self, model: Iterable[str], adapter: str | None) -> dict[str, str]:
        """Match the tensors of adapters in a model to their names in PEFT's files.

        Args:
            model: The names of all the model's tensors.
            adapter: Which adapters, by the name they have in the model; None for the only ones.

        Returns:
            The model's names by those in the files.

        Raises:
            InvalidOption: If the model has no such adapters, or only PEFT knows their names.

        Example:
            >>> config = AdapterConfiguration(content={"peft_type": "LORA"}, path="adapter_config.json")
            >>> config.names(["model.q.base_layer.weight", "model.q.lora_A.default.weight"], None)
            {'base_model.model.model.q.lora_A.weight': 'model.q.lora_A.default.weight'}
        """
        kind = self.content["peft_type"]
        if kind != _KIND:
            raise InvalidOption(
                f"{self.path!r} is of adapters of type {kind!r}, and only PEFT knows how it names them; those of "
                f"{_KIND} are known here, for others let model.save_pretrained(folder) write them, and PEFT's "
                "from_pretrained read them before setup."
            )
        model = list(model)
        found = {name: place for name in model if (place := _place(name)) is not None}
        adapters = sorted({name.split(".")[place] for name, place in found.items()})
        chosen = self._choose(adapters, adapter)
        named = {_stored(name, place): name for name, place in found.items() if name.split(".")[place] == chosen}
        return named | {_wrapped(name): name for name in model if self._is_trained_bias(name, named)}

    def write(self, folder: Folder) -> None:
        """Write it into a folder of weights."""
        folder.write(ADAPTER_CONFIG_NAME, json.dumps(self.content, indent=2, sort_keys=True).encode(), durable=True)

    def _choose(self, adapters: list[str], wanted: str | None) -> str:
        held = ", ".join(map(repr, adapters)) or "none"
        if wanted is not None and wanted not in adapters:
            raise InvalidOption(f"the model has no adapters {wanted!r}{nearest(wanted, adapters)}; it has: {held}.")
        if wanted is None and len(adapters) != 1:
            advice = "say which with adapter=NAME" if adapters else "add them first, as PEFT's get_peft_model does"
            raise InvalidOption(
                f"the model has the adapters {held} of the type {self.content['peft_type']!r} that {self.path!r} "
                f"describes; {advice}."
            )
        return adapters[0] if wanted is None else wanted

    def _is_trained_bias(self, name: str, named: dict[str, str]) -> bool:
        bias = self.content.get("bias", "none")
        layer, _, last = name.rpartition(".")
        if bias == "none" or last != "bias" or name in named.values():
            return False
        layer, _, wrapped = layer.rpartition(".")
        return bias == "all" or (wrapped == "base_layer" and f"{_wrapped(layer)}.lora_A.weight" in named)


def in_model(adapters: Mapping[str, str], model: Collection[str], stored: str) -> str:
    """Return the model's name for a tensor in PEFT's files.

    Args:
        adapters: The model's names of adapters' tensors, by those in the files.
        model: All the model's names.
        stored: The name in the files: of adapters, or of what PEFT has saved with them, such as resized embeddings.
    """
    name = adapters.get(stored, stored)
    return name if name in model else name.removeprefix(_WRAPPED)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def _place(name: str) -> int | None:
    """Return which part of a tensor's name is that of its adapters; None if it is of none."""
    parts = name.split(".")
    places = (place for place, part in enumerate(parts[:-1]) if part.startswith(_ATTRIBUTES) or part == _WHOLE_LAYERS)
    return next((place + 1 for place in places), None)


def _stored(name: str, place: int) -> str:
    """Return the name that a tensor of adapters has in PEFT's files."""
    parts = name.split(".")
    before, rest = parts[:place], parts[place + 1 :]
    if before[-1] == _WHOLE_LAYERS:
        before.pop()
    elif before[-1] == _MAGNITUDE:
        rest = []
    return _wrapped(".".join((*before, *rest)))


def _wrapped(name: str) -> str:
    return name if name.startswith(_WRAPPED) else f"{_WRAPPED}{name}"
