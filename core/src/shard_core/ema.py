"""Averages of weights over training, kept shard by shard."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from shard_core.checkpoint.state.names import BareModule, ModuleTensors
from shard_core.errors import InvalidOption, MissingCapability
from shard_core.parameters import local_part

if TYPE_CHECKING:
    from shard_core.strategy import Strategy


class ExponentialMovingAverage:
    """The exponential moving average of a module's parameters.

    With each update, ``average = decay * average + (1 - decay) * parameter``, the formula of torch's
    ``torch.optim.swa_utils.get_ema_multi_avg_fn``, which computes it on what this rank holds: ranks exchange nothing.
    Parameters of 16 bits are averaged in float32, in which small changes are not lost. Buffers are not averaged; they
    are those of the module at the last update, as in torch's ``AveragedModel``.

    Give it to ``save_checkpoint`` and ``load_checkpoint`` under a key of its own. It is kept like a module that has the
    parameters' names: it comes back at any number of ranks, and a module can be loaded from its key.

    Args:
        strategy: The one that has set the module up.
        module: What setup returned.
        decay: How much of the average stays at an update, from 0 to 1.

    Raises:
        MissingCapability: If the strategy keeps parameters in a form of its own.
        InvalidOption: If the decay is not between 0 and 1.

    Example:
        >>> from shard_core import get_strategy
        >>> strategy = get_strategy("single", accelerator="cpu")
        >>> model = strategy.setup_module(nn.Linear(1, 1))
        >>> average = ExponentialMovingAverage(strategy, model, decay=0.9)
        >>> before = model.weight.item()
        >>> _ = nn.init.constant_(model.weight, before + 1)
        >>> average.update()
        >>> with average.applied():
        ...     round(model.weight.item() - before, 6)
        0.1
        >>> strategy.teardown()
    """

    def __init__(self, strategy: Strategy, module: nn.Module, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay <= 1:
            raise InvalidOption(f"decay is {decay!r}; give a number from 0 to 1, such as 0.999.")
        self._strategy, self._module = strategy, strategy.unwrap(module)
        parts = strategy.engine_flat_parts(self._module)
        if parts is None and not strategy.engine_keeps_torch_tensors:
            raise MissingCapability(
                f"strategy {strategy.info.name!r} keeps parameters in a form of its own, of which no average can be "
                "taken shard by shard; take one that keeps torch's tensors, such as 'ddp'."
            )
        self.decay = decay
        kept = ModuleTensors("module", self._module, (parts or {}).get)
        self._publishes = bool(kept.parts)
        self._parameters = {name for name, tensor in kept.tensors.items() if isinstance(tensor, nn.Parameter)}
        self._sources = kept.tensors | {name: part.values for name, part in kept.parts.items()}
        averages = {
            name: self._copied(source) if name in self._parameters else self._copy(source)
            for name, source in self._sources.items()
        }
        names = {name: name for name in averages} | kept.aliases
        self._averages = averages
        self._tree = BareModule(
            {name: averages[first] for name, first in names.items()},
            {
                averages[name]: dataclasses.replace(part, values=averages[name], alias=None)
                for name, part in kept.parts.items()
            },
        )

    @property
    def kept_module(self) -> nn.Module:
        """What a checkpoint keeps: a module that has the averages for parameters, under the names of these."""
        return self._tree

    @torch.no_grad()
    def update(self) -> None:
        """Add the parameters as they are now to the average; call it after ``optimizer_step``.

        Waits until an async save has copied the average.
        """
        self._strategy.wait_until_staged()
        self._strategy.engine_flat_parts(self._module)  # what users have written is in the sources then
        averages, parameters = [], []
        for name, source in self._sources.items():
            average, now = local_part(self._averages[name]), local_part(source)
            if name in self._parameters and (average.is_floating_point() or average.is_complex()):
                averages.append(average)
                parameters.append(now.to(average.dtype))
            else:
                average.copy_(self._copy(now))
        if averages:
            get_ema_multi_avg_fn(self.decay)(averages, parameters, 0)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Set the module to compute with the averages, to be evaluated; afterwards its parameters are what they were.

        Within, this rank's shards are there once more. Do not train within. Every rank calls this: where an engine
        keeps parameters flat, what they are within and afterwards is sent to all.

        Raises:
            MissingRank: If a rank does not come within ``guard_timeout`` then.
        """
        self._strategy.engine_flat_parts(self._module)
        self._show_shards()
        trained = {name: self._copy(local_part(self._sources[name])) for name in self._parameters}
        self._fill({name: local_part(self._averages[name]) for name in trained})
        try:
            yield
        finally:
            self._show_shards()
            self._fill(trained)

    @torch.no_grad()
    def _fill(self, values: dict[str, torch.Tensor]) -> None:
        self._strategy.wait_until_staged()
        if self._publishes:
            self._strategy.barrier("applied averages of weights")
        for name, value in values.items():
            source = local_part(self._sources[name])
            source.copy_(self._copy(value, source.dtype))
        if self._publishes:
            self._strategy.engine_publish_parts(self._module)

    def _show_shards(self) -> None:
        # An engine that shows whole parameters since the last forward frees them here; else the next would use them.
        self._module.state_dict(keep_vars=True)

    def _copied(self, parameter: torch.Tensor) -> nn.Parameter:
        is_short = parameter.is_floating_point() and parameter.element_size() < torch.float32.itemsize
        copy = self._copy(parameter, torch.float32 if is_short else None)
        return nn.Parameter(copy, requires_grad=False)

    def _copy(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._strategy.engine_copy(tensor, dtype or tensor.dtype)
