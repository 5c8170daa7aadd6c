"""The options that say what is sharded as one unit, and how modules are prepared for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from shard_core.errors import InvalidOption
from shard_core.options import option
from shard_core.plugins.shared_config import checks

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp import BackwardPrefetch
    from torch.distributed.fsdp.wrap import CustomPolicy

_UNIT_BYTES: Final = 64 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreparationOptions:
    """What options hold of units and layers.

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
    activation_checkpointing: type[nn.Module] | Collection[type[nn.Module]] | Callable[[nn.Module], bool] | None = (
        option(None, "submodules that compute their activations again in backward: their class, classes, or a function")
    )
    compile: bool | Mapping[str, Any] = option(
        False, "compile each block (each unit one has chosen) with torch.compile; or arguments for it"
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
    sync_module_states: bool = option(True, "start every rank from rank 0's values; there is no other way")

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
        checks.layers("activation_checkpointing", self.activation_checkpointing)
        if not isinstance(self.compile, bool | Mapping):
            raise InvalidOption(
                f"compile is {self.compile!r:.60}; give True, False, or arguments of torch.compile such as "
                "{'mode': 'max-autotune'}."
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
        if self.sync_module_states is not True:
            raise InvalidOption(
                f"sync_module_states is {self.sync_module_states!r}; a model of different values is nobody's, so "
                "all ranks start from rank 0's: leave it out."
            )
