"""The folder that Hugging Face's libraries load weights from: its files, its index, its configuration."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.format.dtypes import torch_dtype
from shard_core.checkpoint.interop.peft_layout import ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME
from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from shard_core.checkpoint.save.writer import Entry
    from shard_core.checkpoint.storage.interface import Folder

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
_WEIGHTS = re.compile(r"model(?:-\d{5,}-of-\d{5,})?\.safetensors")
#: What stands beside a model's configuration and is needed to use the model.
_COMPANIONS = re.compile(
    r"(?:(?:generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|preprocessor_config|"
    r"processor_config|chat_template)\.json|(?:vocab|merges)\.txt|[\w.-]+\.(?:model|jinja|tiktoken))"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsFile:
    """One file of weights.

    Attributes:
        name: Its name.
        entries: The tensors in it; their element sizes do not grow.
    """

    name: str
    entries: tuple[Entry, ...]


def divide(entries: Sequence[Entry], most_bytes: int) -> list[WeightsFile]:
    """Divide tensors over files, in their order.

    Args:
        entries: The tensors.
        most_bytes: What a file may hold; a larger tensor has a file of its own.

    Example:
        >>> from shard_core.checkpoint.save.writer import Entry
        >>> entries = [Entry(name=name, dtype="F32", shape=(2,)) for name in "abc"]
        >>> [(file.name, len(file.entries)) for file in divide(entries, 16)]
        [('model-00001-of-00002.safetensors', 2), ('model-00002-of-00002.safetensors', 1)]
        >>> [file.name for file in divide(entries, 100)]
        ['model.safetensors']
    """
    files: list[list[Entry]] = []
    room = -1
    for entry in entries:
        if entry.bytes > room or not files:
            files.append([])
            room = most_bytes
        files[-1].append(entry)
        room -= entry.bytes
    names = [f"model-{place:05d}-of-{len(files):05d}.safetensors" for place in range(1, len(files) + 1)]
    names = names if len(files) > 1 else ["model.safetensors"]
    return [whole_file(name, each) for name, each in zip(names, files, strict=True)]


def whole_file(name: str, entries: Sequence[Entry]) -> WeightsFile:
    """Return a file of these tensors, sorted as a file needs them."""
    return WeightsFile(name=name, entries=tuple(sorted(entries, key=lambda entry: -entry.item_bytes)))


def write_weights_index(folder: Folder, files: Sequence[WeightsFile]) -> None:
    """Write which file each tensor is in, where there are several files."""
    if len(files) > 1:
        content = {
            "metadata": {"total_size": sum(entry.bytes for file in files for entry in file.entries)},
            "weight_map": dict(sorted((entry.name, file.name) for file in files for entry in file.entries)),
        }
        folder.write(INDEX_NAME, json.dumps(content, indent=2).encode() + b"\n", durable=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """A model's configuration, and the files that go with it.

    Attributes:
        content: What stands in ``config.json``.
        companions: Tokenizer files and the like, to be copied as they are.
    """

    content: dict[str, Any]
    companions: tuple[Path, ...] = ()

    @classmethod
    def find(cls, path: Path) -> Configuration:
        """Read it from a folder as Hugging Face's libraries write it, or from a JSON file.

        Raises:
            InvalidOption: If there is none.
        """
        file = path / CONFIG_NAME if path.is_dir() else path
        try:
            content = json.loads(file.read_bytes())
        except OSError as error:
            raise InvalidOption(
                f"the configuration {str(file)!r} cannot be read: {error.strerror}; give a JSON file, or a folder with "
                f"a {CONFIG_NAME}."
            ) from error
        except (ValueError, RecursionError) as error:
            raise InvalidOption(f"the configuration {str(file)!r} is no JSON: {error}.") from error
        if not isinstance(content, dict):
            raise InvalidOption(f"the configuration {str(file)!r} is no JSON object.")
        beside = sorted(path.iterdir()) if path.is_dir() else []
        companions = [each for each in beside if _COMPANIONS.fullmatch(each.name) and each.is_file()]
        return cls(content=content, companions=tuple(companions))

    def write(self, folder: Folder, dtype: str | None) -> None:
        """Write it, and the files that go with it, into a folder.

        Args:
            folder: The folder.
            dtype: The dtype the weights were cast to, by its name in safetensors files; None if they were not.
        """
        content = dict(self.content)
        if dtype is not None:
            # Which of the two names is read depends on the release of transformers.
            for key in [key for key in ("dtype", "torch_dtype") if key in content] or ["torch_dtype"]:
                content[key] = str(torch_dtype(dtype)).removeprefix("torch.")
        folder.write(CONFIG_NAME, json.dumps(content, indent=2).encode() + b"\n", durable=True)
        for companion in self.companions:
            folder.write(companion.name, companion.read_bytes(), durable=True)


def is_of_an_export(name: str) -> bool:
    """Return whether a folder of weights may hold a file of this name."""
    named = (CONFIG_NAME, INDEX_NAME, ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME)
    return bool(_WEIGHTS.fullmatch(name) or _COMPANIONS.fullmatch(name)) or name in named
