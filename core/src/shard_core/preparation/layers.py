"""How the layers of a module run: what a strategy's options change about them before it shards or wraps them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shard_core.preparation.activation_checkpointing import recompute
from shard_core.preparation.activation_offload import layers_to_offload, offload
from shard_core.preparation.compilation import compile_blocks

if TYPE_CHECKING:
    from torch import nn


class _Options(Protocol):
    """What ``shard_core.plugins.LayerOptions`` holds."""

    @property
    def activation_checkpointing(self) -> Any: ...

    @property
    def activation_offload(self) -> Any: ...

    @property
    def compile(self) -> Any: ...


def prepare_layers(module: nn.Module, options: _Options, blocks: Sequence[nn.Module] = ()) -> None:
    """Change how layers run; an engine calls it first in its setup, while the module is as the user wrote it.

    Args:
        module: The user's module, changed in place; its parameters and their names stay.
        options: The strategy's configuration, which inherits from ``shard_core.plugins.LayerOptions``.
        blocks: Which submodules ``compile`` compiles; those that repeat unless given.

    Raises:
        InvalidOption: If an option names what the module does not have.

    Example:
        >>> from shard_core.plugins import LayerOptions
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> prepare_layers(model, LayerOptions(activation_checkpointing=nn.Tanh))
        >>> [name for name, _ in model.named_parameters()]
        ['0.weight', '0.bias']
    """
    if options.activation_checkpointing is not None:
        recompute(module, options.activation_checkpointing)
    offloaded = layers_to_offload(module, options.activation_offload)
    if options.compile is not False:
        compile_blocks(module, options.compile, blocks, offloaded)
    # Outside of what is recomputed: it is the inputs of checkpointed layers that move.
    offload(offloaded)
