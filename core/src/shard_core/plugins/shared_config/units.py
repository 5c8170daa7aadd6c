"""The options that say what ``fully_shard`` shards as one unit, when it travels, in which dtype, and where it lives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Final

from shard_core.errors import InvalidOption
from shard_core.options import option
from shard_core.plugins.shared_config import checks

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
    )
    from torch.distributed.fsdp.wrap import CustomPolicy

_UNIT_BYTES: Final = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullyShardOptions:
    """Options of engines that shard with ``shard_core.backend.FullySharder``.

    Raises:
        InvalidOption: If a value has the wrong type or makes no sense, or another leaves it without effect.
    """

    unit_bytes: int = option(
        _UNIT_BYTES, "neighbouring blocks share one message until it carries this many bytes of parameters"
    )
    auto_wrap_policy: type[nn.Module] | Collection[type[nn.Module]] | Callable[..., bool] | CustomPolicy | None = (
        option(
            None, "which submodules are units, instead of unit_bytes: their classes, or a policy of torch's signature"
        )
    )
    ignored_modules: Collection[nn.Module | type[nn.Module] | str] = option(
        (), "submodules whose parameters stay whole on every rank: names (* for one part), classes, or themselves"
    )
    ignored_states: Collection[nn.Parameter | nn.Module | str] = option(
        (), "parameters that stay whole on every rank: names (* for one part), or themselves"
    )
    backward_prefetch: str | int | BackwardPrefetch | None = option(
        "backward_pre",
        "gather the next unit before gradients are computed (backward_pre) or after (backward_post, None); or how many "
        "units ahead",
    )
    forward_prefetch: bool | int = option(
        False, "let each unit gather the next one in the order of registration; or how many of them"
    )
    param_init_fn: Callable[[nn.Module], object] | None = option(
        None, "initialises what a submodule has on the meta device, where it was not built in module_init_context()"
    )
    reshard_after_forward: bool | None = option(
        None, "free whole parameters between forward and backward; None does so for all but the root's"
    )
    cpu_offload: bool | CPUOffload | OffloadPolicy | None = option(
        None, "keep shards, gradients and optimizer state in host memory, and step them there"
    )
    mixed_precision: MixedPrecision | MixedPrecisionPolicy | None = option(
        None, "dtypes in which parameters and gradients travel and products are computed; None follows precision"
    )

    @property
    def gathered_in_backward(self) -> int | None:
        """Return how many units are gathered ahead in backward; None leaves it to the engine, which takes the next."""
        if self.backward_prefetch == "backward_pre":
            return None
        return self.backward_prefetch if isinstance(self.backward_prefetch, int) else 0

    def __post_init__(self) -> None:
        """Check types and values, and bring ``backward_prefetch`` to one spelling."""
        if isinstance(self.unit_bytes, bool) or not isinstance(self.unit_bytes, int) or self.unit_bytes < 1:
            raise InvalidOption(f"unit_bytes is {self.unit_bytes!r}; give a whole number of bytes from 1 up.")
        if isinstance(self.auto_wrap_policy, type):
            object.__setattr__(self, "auto_wrap_policy", (self.auto_wrap_policy,))
        checks.policy("auto_wrap_policy", self.auto_wrap_policy)
        if self.auto_wrap_policy is not None and self.unit_bytes != _UNIT_BYTES:
            raise InvalidOption(
                f"unit_bytes is {self.unit_bytes}, but auto_wrap_policy says which submodules are units; leave one of "
                "them out."
            )
        for name in ("ignored_modules", "ignored_states"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
            checks.collection(name, getattr(self, name))
        object.__setattr__(self, "backward_prefetch", checks.backward_prefetch(self.backward_prefetch))
        if not isinstance(self.forward_prefetch, int) or self.forward_prefetch < 0:
            raise InvalidOption(
                f"forward_prefetch is {self.forward_prefetch!r}; give True, False, or a number of units."
            )
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise InvalidOption(f"param_init_fn is {self.param_init_fn!r:.60}; give a function of a module.")
        if self.reshard_after_forward is not None and not isinstance(self.reshard_after_forward, bool):
            raise InvalidOption(f"reshard_after_forward is {self.reshard_after_forward!r}; give True, False or None.")
        object.__setattr__(self, "cpu_offload", checks.offload(self.cpu_offload))
        checks.mixed_precision(self.mixed_precision)
