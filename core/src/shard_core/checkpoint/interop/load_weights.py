"""Loading weights from a foreign format into a live module: nothing is touched until all ranks have compared all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.checkpoint.all_ranks import check_same_path, on_all_ranks
from shard_core.checkpoint.checks import check_adapter, check_flag, check_key, check_names, check_storage_options
from shard_core.checkpoint.format.foreign_formats import INDEX_SUFFIX
from shard_core.checkpoint.interop.hf_conversion import Conversion
from shard_core.checkpoint.interop.mismatch import Findings, Names, WeightsMatcher, fill, renamed
from shard_core.checkpoint.interop.peft_layout import AdapterConfiguration, in_model
from shard_core.checkpoint.interop.recognition import find_adapters, find_weights, received_weights
from shard_core.checkpoint.interop.source import Source, open_source
from shard_core.checkpoint.keys import name_in
from shard_core.checkpoint.load.mismatch import listing
from shard_core.checkpoint.storage.interface import Listed
from shard_core.errors import CheckpointMismatch, InvalidOption

if TYPE_CHECKING:
    from torch import nn

    from shard_core.checkpoint.interop.weights import Reader, Weights
    from shard_core.checkpoint.state.shard import TensorShard
    from shard_core.checkpoint.state.training_state import TrainingState
    from shard_core.coordinator import Coordinator


def load_weights(
    path: str | os.PathLike[str],
    state: TrainingState,
    *,
    coordinator: Coordinator,
    module: nn.Module | None = None,
    key: str | None = None,
    names: Names | None = None,
    adapter: str | None = None,
    cast: bool = False,
    strict: bool = True,
    storage_options: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Fill one module in place from a foreign format; each rank reads what it holds.

    Args:
        path: The files, by a path or a URL.
        state: The module's, and nothing else's.
        coordinator: How ranks talk.
        module: The module itself, whose library may convert what is in the files; None takes them as they are.
        key: Which state dict in the files; None if they are one themselves.
        names: How the files' names become the module's; None if they are the same.
        adapter: Which of the module's adapters a folder of PEFT's fills; None for the only ones.
        cast: Whether floating-point tensors may change their dtype.
        strict: Whether a mismatch is an error rather than something to leave as it is.
        storage_options: For the store a URL names.

    Returns:
        What did not fit and was left as it was, a sentence each; empty if ``strict``.

    Raises:
        CheckpointNotFound: If there are no weights at the path.
        CheckpointMismatch: Listing every mismatch; nothing was changed.
        CheckpointCorrupted: If the files are damaged, or hold what would have to be executed; nothing was changed.
    """
    doing = f"loading {os.fspath(path)!r}"

    def look(stack: contextlib.ExitStack) -> tuple[str, _Found | None]:
        check_key(key)
        check_names(names)
        check_adapter(adapter)
        check_flag("cast", cast)
        check_flag("strict", strict)
        check_storage_options(storage_options)
        sources.append(stack.enter_context(open_source(path, storage_options, index=INDEX_SUFFIX)))
        if coordinator.rank != 0:
            return os.fspath(path), None
        # Rank 0 alone looks them up: on shared file systems ranks may see different things.
        source = sources[0]
        listing = source.listing()
        source.mirror(listing)
        with source.naming():
            weights = find_weights(source, key)
            adapters = find_adapters(source)
        if adapter is not None and adapters is None:
            raise InvalidOption(
                f"adapter={adapter!r} is for a folder of PEFT's adapters; {path!r} is none, leave it out."
            )
        files = [(each.name, each.bytes) for each in listing]
        described = None if adapters is None else dataclasses.asdict(adapters)
        return os.fspath(path), (type(weights).__name__, weights.to_plain(), files, described)

    sources: list[Source] = []
    with contextlib.ExitStack() as stack:
        answers = on_all_ranks(coordinator, doing, lambda: look(stack))
        check_same_path([given for given, _ in answers])
        found = answers[0][1]
        assert found is not None  # rank 0 has found some
        kind, plain, files, described = found
        adapters = None if described is None else AdapterConfiguration(**described)
        listed = [Listed(name=name, bytes=length) for name, length in files]
        load = _Load(received_weights(kind, plain), listed, sources[0], state, module, names=names, cast=cast)
        load.fill_adapters_alone(adapters, adapter)
        each = on_all_ranks(coordinator, doing, lambda: load.compare(coordinator.rank, stack).to_plain())
        findings = Findings.joint([Findings.from_plain(*plain) for plain in each])
        if findings.mismatches and strict:
            raise CheckpointMismatch(_sentence(os.fspath(path), findings.mismatches))
        on_all_ranks(coordinator, doing, lambda: load.fill(findings))
    return findings.mismatches


#: What rank 0 sends the others of the files: the kind of weights, these in plain values, names and lengths, and the
#: configuration of adapters.
_Found = tuple[str, Mapping[str, Any], list[tuple[str, int | None]], dict[str, Any] | None]


class _Load:
    """The load on one rank, in the order of its methods."""

    def __init__(
        self,
        weights: Weights,
        listing: Sequence[Listed],
        source: Source,
        state: TrainingState,
        module: nn.Module | None,
        *,
        names: Names | None,
        cast: bool,
    ) -> None:
        self._weights = weights
        self._listing = listing
        self._source = source
        self._state = state
        self._module = module
        self._names = names
        self._cast = cast
        self._adapters: AdapterConfiguration | None = None
        self._adapter: str | None = None

    def fill_adapters_alone(self, adapters: AdapterConfiguration | None, adapter: str | None) -> None:
        """Note whether the files are those of adapters, and of which; None if they are not."""
        self._adapters, self._adapter = adapters, adapter

    def compare(self, rank: int, stack: contextlib.ExitStack) -> Findings:
        """Open the files, and return what does not fit."""
        if rank != 0:
            self._source.mirror(self._listing)
            self._weights = self._weights.moved(self._source.root)
        self._state.prepare_load([])
        self._shards: dict[str, list[TensorShard]] = {}
        for shard in self._state.shards():
            self._shards.setdefault(name_in(shard.key), []).append(shard)
        aliases = {name_in(alias): name_in(key) for alias, key in self._state.aliases().items()}
        self._reader: Reader = stack.enter_context(self._weights.opened(self._source))
        names = self._names
        if self._adapters is not None:
            adapters = self._adapters.names([*self._shards, *aliases], self._adapter)
            names = functools.partial(in_model, adapters, {*self._shards, *aliases}) if names is None else names
            asked = {*adapters.values(), *filter(None, (renamed(name, names) for name in self._weights.tensors))}
            # What the adapters stand in is not in the files, and stays as it is.
            asked = {aliases.get(name, name) for name in asked}
            self._shards = {name: shards for name, shards in self._shards.items() if name in asked}
        elif self._module is not None and names is None:
            self._convert(self._module)
        matcher = WeightsMatcher(self._weights, self._shards, aliases, names=names, cast=self._cast)
        self._sources = matcher.sources
        with self._source.naming():
            return matcher.findings(self._reader)

    def _convert(self, module: nn.Module) -> None:
        """Replace weights that a library calls or lays out otherwise in files by what it makes of them."""
        stored = self._weights.tensors
        conversion = Conversion.of(module, stored)
        if conversion is not None:
            self._reader = conversion.opened(self._reader, stored)
            self._weights = dataclasses.replace(self._weights, tensors=conversion.tensors)

    def fill(self, findings: Findings) -> None:
        """Fill what fits."""
        for name, shards in self._shards.items():
            if name not in findings.unfit:
                for shard in shards:
                    fill(shard, self._sources[name][0], self._reader)
        self._state.finish_load([])


def _sentence(path: str, mismatches: Sequence[str]) -> str:
    return (
        f"{path!r} and the module differ in {len(mismatches)} ways; nothing was changed (names= renames or drops "
        f"tensors, strict=False loads what fits):\n{listing(mismatches)}"
    )
