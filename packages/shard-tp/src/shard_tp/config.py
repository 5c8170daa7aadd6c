"""The options of the strategy of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

from shard_core import InvalidOption
from shard_core.plugins import FullyShardOptions, LayerOptions, option, refuse_other_values

_BY_BYTES: Final = "units are formed by unit_bytes alone under this strategy, for now"
_ALL_SHARDED: Final = "everything is split or sharded under this strategy, for now"
_IN_TURN: Final = "units are gathered as torch does it under this strategy, for now"

#: Options that engines share and that this one does not honour yet, each with the reason.
_LATER: Final[Mapping[str, str]] = {
    "activation_offload": "what split layers save is not moved under this strategy, for now",
    "compile": "split layers are not compiled under this strategy, for now",
    "auto_wrap_policy": _BY_BYTES,
    "ignored_modules": _ALL_SHARDED,
    "ignored_states": _ALL_SHARDED,
    "backward_prefetch": _IN_TURN,
    "forward_prefetch": _IN_TURN,
    "param_init_fn": "modules are built in module_init_context() or on a device under this strategy, for now",
    "cpu_offload": "shards stay on the device under this strategy, for now",
    "mixed_precision": "the argument precision says which dtype where under this strategy, for now",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPConfig(LayerOptions, FullyShardOptions):
    """Options of ``tp``.

    Raises:
        InvalidOption: If a value has the wrong type or makes no sense.
    """

    data_parallel_size: int | Literal["auto"] = option(
        "auto", "ranks that see different data; 'auto': the hosts, or what tensor_parallel_size leaves"
    )
    tensor_parallel_size: int | Literal["auto"] = option(
        "auto", "ranks that share each layer; 'auto': the ranks of a host, or what data_parallel_size leaves"
    )
    plan: Mapping[str, Any] | Literal["auto"] = option(
        "auto", "how layers are split: module names, * for one part, to styles; 'auto': by the model's own plan"
    )
    parallelize_fn: Callable[..., Any] | None = option(
        None, "splits layers by hand instead of plan: parallelize_fn(model, mesh), mesh the tensor-parallel ranks"
    )
    check_batches: bool = option(True, "compare the inputs of each forward inside a tensor-parallel group")
    save_distributed_checkpoint: bool = option(
        True, "save each rank's shards unless state_dict_type says otherwise; False saves whole tensors"
    )

    def __post_init__(self) -> None:
        """Check types and values."""
        FullyShardOptions.__post_init__(self)
        LayerOptions.__post_init__(self)
        refuse_other_values(self, _LATER)
        for name in ("data_parallel_size", "tensor_parallel_size"):
            size = getattr(self, name)
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise InvalidOption(f"{name} is {size!r}; give a number of ranks from 1 up, or 'auto'.")
        if self.plan != "auto" and not isinstance(self.plan, Mapping):
            raise InvalidOption(f"plan is {self.plan!r}; give a dict of module names to styles, or 'auto'.")
        if self.plan != "auto":
            for pattern in self.plan:
                if not isinstance(pattern, str):
                    raise InvalidOption(f"plan names {pattern!r}; a submodule's name is a str, such as 'blocks.*.up'.")
        if self.parallelize_fn is not None and not callable(self.parallelize_fn):
            raise InvalidOption(f"parallelize_fn is {self.parallelize_fn!r}; give a function of model and mesh.")
        if self.plan != "auto" and self.parallelize_fn is not None:
            raise InvalidOption("plan and parallelize_fn are both given; a model is split by one of them.")
        for name in ("check_batches", "save_distributed_checkpoint"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidOption(f"{name} is {getattr(self, name)!r}; give True or False.")
