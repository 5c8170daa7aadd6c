"""A unit: upstream's class, with what it lacks."""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def unit_class() -> Any:
    """Return the class of units, whose forward notes in ``running`` that it runs."""
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
    from torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import TrainingState

    class UnitFullyShardedDataParallel(XlaFullyShardedDataParallel):
        running = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            before, self.running = self.running, True
            try:
                return super().forward(*args, **kwargs)
            finally:
                self.running = before

        def _rebuild_full_params(self, *args: Any, **kwargs: Any) -> None:
            super()._rebuild_full_params(*args, **kwargs)
            # Strides are computed along with a shape, when it is asked for. A parameter that had been looked at while
            # it was freed would be detached with the old strides.
            for whole in self.full_params:
                whole.dim()

        def _wait_for_post_backward(self) -> None:
            # Only a gradient of its own ends a unit's backward, and upstream asks whether all of them have ended.
            units = [each for each in self.modules() if isinstance(each, XlaFullyShardedDataParallel)]
            for unit in units:
                has_begun = unit.training_state == TrainingState.BACKWARD_PRE
                if has_begun and any(parameter.requires_grad for parameter in unit.full_params):
                    unit.training_state = TrainingState.BACKWARD_POST
            super()._wait_for_post_backward()

    return UnitFullyShardedDataParallel
