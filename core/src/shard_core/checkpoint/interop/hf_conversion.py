"""Weights of transformers whose names or layout in files are not the module's, converted as the library does it.

Since transformers 5 a model may have other names than its files, and tensors that these hold in parts: the experts of a
mixture, say. Which become which is the library's own mapping. Each rank reads what goes into a tensor of which it holds
a shard, and converts it.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shard_core.checkpoint.format.box import Box
from shard_core.checkpoint.interop.weights import Layout, Reader

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
    """Stored tensors that are converted together.

    Attributes:
        target: The name the library finds the group by.
        sources: The stored tensors, in order, each with the pattern it matched; None if the group only renames.
        converter: The library's; None if the group only renames.
    """

    target: str
    sources: Sequence[tuple[str, str | None]]
    converter: Any = None

    def converted(self, model: Any, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the live tensors that stored ones make up."""
        if self.converter is None:
            return {self.target: tensors[0]}
        converter = copy.deepcopy(self.converter)
        for (name, pattern), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.target, name, pattern, tensor)
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


class Conversion:
    """What the files of one model have to go through.

    Args:
        model: The user's class and configuration, on the meta device.
        groups: What is converted together, by the names of the live tensors that come of it.
        tensors: The layouts of these.
    """

    def __init__(self, model: Any, groups: Mapping[str, _Group], tensors: Mapping[str, Layout]) -> None:
        self.model = model
        self.groups = groups
        self.tensors = tensors

    @classmethod
    def of(cls, module: nn.Module, stored: Mapping[str, Layout]) -> Conversion | None:
        """Find out how stored tensors become those of a module.

        Args:
            module: The user's.
            stored: The layouts of the stored tensors.

        Returns:
            None if the module is none of transformers', or the files have its names.
        """
        library = sys.modules.get("transformers")
        if library is None or not isinstance(module, getattr(library, "PreTrainedModel", ())):
            return None
        parameters = module.named_parameters(remove_duplicate=False)
        live = {name for name, _ in (*parameters, *module.named_buffers(remove_duplicate=False))}
        if live.issuperset(stored):
            return None
        try:
            mapping = importlib.import_module("transformers.conversion_mapping")
            loading = importlib.import_module("transformers.core_model_loading")
        except ImportError:  # before transformers 5 files have the names of modules
            return None
        model = _skeleton(module)
        state = model.state_dict()
        transforms = mapping.get_model_conversion_mapping(model)
        renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
        converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        found: dict[str, _Group] = {}
        for name in sorted(stored, key=loading.dot_natural_key):
            target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
            if target not in state and name in state:
                target, pattern = name, None
            if pattern is None and target in found:
                target = name  # another has become that already; this one is in excess
            group = found.get(target) or _Group(target=target, sources=(), converter=by_pattern.get(pattern or ""))
            found[target] = dataclasses.replace(group, sources=(*group.sources, (name, pattern)))
        return cls(model, *_results(model, found.values(), stored))

    def opened(self, reader: Reader, stored: Mapping[str, Layout]) -> Reader:
        """Return a reader of the live tensors.

        Args:
            reader: Of the stored ones.
            stored: Their layouts.
        """
        return _ConvertingReader(self, reader, stored)


def _skeleton(module: nn.Module) -> Any:
    """Build the model anew without values: engines exchange its tensors, and its class, which the library goes by."""
    kind = next(
        each for each in type(module).__mro__ if each.__module__.partition(".")[0] not in ("torch", "shard_core")
    )
    with torch.random.fork_rng([]), torch.device("meta"):
        return kind(module.config)


def _results(
    model: Any, groups: Iterable[_Group], stored: Mapping[str, Layout]
) -> tuple[dict[str, _Group], dict[str, Layout]]:
    """Convert tensors without values, to learn names and layouts; what cannot be converted keeps its own."""
    owners: dict[str, _Group] = {}
    tensors: dict[str, Layout] = {}
    for group in groups:
        empty = [torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta") for name, _ in group.sources]
        try:
            made = group.converted(model, empty)
        except (RuntimeError, ValueError, TypeError, LookupError):
            # They do not fit together, and are then listed as what they are.
            owners |= {name: _Group(target=name, sources=((name, None),)) for name, _ in group.sources}
            tensors |= {name: stored[name] for name, _ in group.sources}
            continue
        owners |= dict.fromkeys(made, group)
        tensors |= {name: Layout(tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()}
    return owners, tensors


class _ConvertingReader(Reader):
    """Reads stored tensors whole, and keeps those of one group."""

    def __init__(self, conversion: Conversion, reader: Reader, stored: Mapping[str, Layout]) -> None:
        self._conversion = conversion
        self._reader = reader
        self._stored = stored
        self._group: _Group | None = None
        self._made: dict[str, torch.Tensor] = {}

    def read(self, name: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        group = self._conversion.groups[name]
        if group.converter is None:
            yield from self._reader.read(group.sources[0][0], box)
            return
        if group is not self._group:
            self._made = {}  # before another takes its room
            self._made = group.converted(self._conversion.model, [self._whole(source) for source, _ in group.sources])
            self._group = group
        yield box, self._made[name][box.slices((0,) * len(box.offsets))]

    def check(self, name: str, box: Box) -> None:
        group = self._conversion.groups[name]
        if group.converter is None:
            self._reader.check(group.sources[0][0], box)
            return
        for source, _ in group.sources:
            if 0 not in self._stored[source].shape:
                self._reader.check(source, Box.whole(self._stored[source].shape))

    def _whole(self, name: str) -> torch.Tensor:
        layout = self._stored[name]
        tensor = torch.empty(layout.shape, dtype=layout.dtype)
        if tensor.numel():
            for box, piece in self._reader.read(name, Box.whole(layout.shape)):
                tensor[box.slices((0,) * tensor.dim())].copy_(piece)
        return tensor
