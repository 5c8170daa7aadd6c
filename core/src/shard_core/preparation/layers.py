"""How the layers of a module run: what a strategy's options change about them before it shards or wraps them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from shard_core._versions import COMPILED_CALL
from shard_core.preparation.activation_checkpointing import recompute
from shard_core.preparation.activation_offload import layers_to_offload, offload
from shard_core.preparation.compilation import compile_blocks

if TYPE_CHECKING:
    from torch import nn


#: Where a module keeps how it runs, when it is not as its class does.
_CALLS = ("forward", COMPILED_CALL)


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

    Teardown undoes it, and so does a setup that fails; the engine need not.

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


class LayerCalls:
    """How the parts of a module run, which setup may exchange and teardown restores.

    It is seen from outside what an engine exchanges, so that no engine has to remember it.

    Args:
        module: The user's, before setup has changed it.

    Example:
        >>> from shard_core.plugins import LayerOptions
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> calls = LayerCalls(model)
        >>> with calls.exchanged():
        ...     prepare_layers(model, LayerOptions(activation_checkpointing=nn.Tanh))
        >>> "forward" in vars(model[1])
        True
        >>> calls.restore()
        >>> "forward" in vars(model[1])
        False
    """

    def __init__(self, module: nn.Module) -> None:
        self._before = [(part, name, vars(part).get(name)) for part in module.modules() for name in _CALLS]
        self._exchanged: list[tuple[nn.Module, str, Any, Any]] = []

    @contextlib.contextmanager
    def exchanged(self) -> Iterator[None]:
        """Record what is exchanged inside; if that fails, restore it."""
        try:
            yield
        except BaseException:
            self._record()
            self.restore()
            raise
        self._record()

    def _record(self) -> None:
        now = [(part, name, old, vars(part).get(name)) for part, name, old in self._before]
        self._exchanged = [each for each in now if each[2] is not each[3]]
        self._before.clear()

    def restore(self) -> None:
        """Restore what was exchanged, but for what somebody has exchanged again since."""
        for part, name, old, new in self._exchanged:
            if vars(part).get(name) is not new:
                continue
            if old is None:
                del vars(part)[name]
            else:
                vars(part)[name] = old
        self._exchanged.clear()
