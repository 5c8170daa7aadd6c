"""The options that say how the layers of a module run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from shard_core.errors import InvalidOption
from shard_core.options import option
from shard_core.plugins.shared_config import checks

if TYPE_CHECKING:
    from torch import nn


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Options of every engine whose modules are torch's: what layers keep for backward, and which are compiled.

    An engine's configuration inherits from it, and its setup calls ``shard_core.backend.prepare_layers``.

    Raises:
        InvalidOption: If a value has the wrong type or makes no sense.

    Example:
        >>> LayerOptions(activation_offload=True).compile
        False
        >>> LayerOptions(activation_checkpointing={"layer": int})
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: activation_checkpointing has no 'layer'; did you mean 'layers'? A dict of it \
has 'layers', and 'policy', which says what of them is kept.
    """

    activation_checkpointing: (
        type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool] | Mapping[str, Any] | None
    ) = option(
        None,
        "submodules that compute their activations again in backward: their class, classes, or a function; or "
        "{'layers': these, 'policy': operations to keep, or a function of torch's signature}",
    )
    activation_offload: bool | type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool] = option(
        False,
        "keep what forwards save for backward in host memory: of the whole module (True), or of submodules: their "
        "class, classes, or a function",
    )
    compile: bool | Mapping[str, Any] = option(
        False, "compile each block (each unit one has chosen) with torch.compile; or arguments for it"
    )

    def __post_init__(self) -> None:
        """Check types and values."""
        layers = checks.checkpointing("activation_checkpointing", self.activation_checkpointing)
        object.__setattr__(self, "activation_checkpointing", layers)
        if not isinstance(self.activation_offload, bool):
            if self.activation_offload is None:
                raise InvalidOption("activation_offload is None; leave it out, or give False.")
            checks.layers("activation_offload", self.activation_offload)
        if not isinstance(self.compile, bool | Mapping):
            raise InvalidOption(
                f"compile is {self.compile!r:.60}; give True, False, or arguments of torch.compile such as "
                "{'mode': 'max-autotune'}."
            )
