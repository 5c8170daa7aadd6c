"""A unit: upstream's class, with what it lacks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from shard_core import SetupError
from shard_core.backend import inside_objects
from shard_xla._versions import replace_value

_EMPTY = "dimensionality of sizes (1) must match dimensionality of strides"
"""What torch says of writing to a parameter that upstream has freed."""


@functools.cache
def unit_class() -> Any:
    """Return the class of units, whose forward notes in ``running`` that it runs.

    What upstream splits by rows has to have some. Here a parameter without dims is one of a single row, which the first
    rank holds; its shards have no dims either.
    """
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
    from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import TrainingState

    class UnitFullyShardedDataParallel(XlaFullyShardedDataParallel):
        running = False
        backward_ended: Callable[[], None] = staticmethod(lambda: None)
        freeing: Callable[[], None] = staticmethod(lambda: None)
        gathering: Callable[[], None] = staticmethod(lambda: None)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            before, self.running, state = self.running, True, self.training_state
            try:
                return super().forward(*args, **kwargs)
            except BaseException as error:
                for unit in self.modules():  # what has been written by then counts, before a step changes shards
                    if isinstance(unit, UnitFullyShardedDataParallel):
                        unit.freeing()
                self.training_state = state  # else nothing goes on from here
                if _EMPTY not in str(error):
                    raise
                raise SetupError(
                    "a forward wrote to a weight of a unit inside it, which is whole only while that unit runs; write "
                    "to it in the unit's own forward, or let auto_wrap_policy make one unit of both."
                ) from error
            finally:
                self.running = before

        def _register_pre_backward_hooks(self, outputs: Any) -> Any:
            # Upstream passes over what a unit inside has returned, and so over what stands now where a tensor that
            # nobody holds any longer has stood; a backward through nothing else would come past this unit.
            self._output_pre_backward_hook_registered = set()
            super()._register_pre_backward_hooks(inside_objects(outputs))  # into which upstream does not look
            return super()._register_pre_backward_hooks(outputs)

        def _flatten_and_pad_to_world_size(self, tensor: torch.Tensor, world_size: int) -> torch.Tensor:
            return super()._flatten_and_pad_to_world_size(self._with_rows(tensor), world_size)

        def _get_shard(self, tensor: torch.Tensor) -> Any:
            shard: Any = super()._get_shard(tensor)
            return shard.view(()) if self._lacks_rows(tensor) else shard

        def _rebuild_full_params(self, *args: Any, **kwargs: Any) -> None:
            if not self.has_full_params:
                self.gathering()
            shards: Any = self.sharded_params
            self.sharded_params = [self._with_rows(each) for each in shards]
            try:
                super()._rebuild_full_params(*args, **kwargs)
            finally:
                self.sharded_params = shards
            for whole, shard in zip(self.full_params, shards, strict=True):
                if self._lacks_rows(shard) and whole.dim():
                    replace_value(whole, whole.view(()))
                # Strides are computed along with a shape, when it is asked for. A parameter that had been looked at
                # while it was freed would be detached with the old strides.
                whole.dim()

        def _free_full_params(self, *args: Any, **kwargs: Any) -> None:
            self.freeing()
            super()._free_full_params(*args, **kwargs)

        def _post_backward_hook(self, param: Any, *rest: Any) -> None:
            reduce: Any = self.reduce_scatter_op
            anything: Any = _ReduceScatterOfAnything(reduce, without_dims=self._lacks_rows(param._sharded_param))
            self.reduce_scatter_op = anything
            try:
                super()._post_backward_hook(param, *rest)
            finally:
                self.reduce_scatter_op = reduce

        def _wait_for_post_backward(self) -> None:
            # Only a gradient of its own ends a unit's backward, be it of what is frozen by then, and upstream asks
            # whether all have ended of which something is trained.
            units = [each for each in self.modules() if isinstance(each, XlaFullyShardedDataParallel)]
            for unit in units:
                if unit.training_state in (TrainingState.BACKWARD_PRE, TrainingState.BACKWARD_POST):
                    trains = any(parameter.requires_grad for parameter in unit.full_params)
                    unit.training_state = TrainingState.BACKWARD_POST if trains else TrainingState.BACKWARD_PRE
            super()._wait_for_post_backward()
            self.backward_ended()

        def _lacks_rows(self, tensor: torch.Tensor) -> bool:
            return bool(self._shard_param_on_dim_0) and not tensor.dim()

        def _with_rows(self, tensor: Any) -> Any:
            """Return a tensor without dims as one of a single row."""
            if not self._lacks_rows(tensor):
                return tensor
            row = tensor.detach().view(1)
            row._orig_size = torch.Size([1])  # a shard's: the shape of the whole parameter
            return row

    return UnitFullyShardedDataParallel


@dataclasses.dataclass(frozen=True)
class _ReduceScatterOfAnything:
    """What reduces and scatters one gradient, be it without elements, where XLA's ends the process, or without dims.

    Attributes:
        reduce: XLA's, or what is in its place.
        without_dims: Whether the gradient is the single row of a parameter without dims.
    """

    reduce: Any
    without_dims: bool

    def __call__(self, gradient: torch.Tensor, done: Callable[[torch.Tensor], None]) -> None:
        """Reduce and scatter the gradient, and hand on this rank's part."""
        if not gradient.numel():
            done(gradient)
        elif self.without_dims:
            self.reduce(gradient, lambda part: done(part.view(())))
        else:
            self.reduce(gradient, done)

    def flush(self) -> None:
        """Send what waits."""
        self.reduce.flush()
