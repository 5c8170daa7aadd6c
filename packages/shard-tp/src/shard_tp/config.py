"""The options of the strategy of this package."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from shard_core import InvalidOption
from shard_core.plugins import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPConfig:
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
    unit_bytes: int = option(
        64 * 2**20, "neighbouring blocks share one message until it carries this many bytes of parameters"
    )
    reshard_after_forward: bool | None = option(
        None, "free whole parameters between forward and backward; None does so for all but the root's"
    )

    def __post_init__(self) -> None:
        """Check types and values."""
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
        if isinstance(self.unit_bytes, bool) or not isinstance(self.unit_bytes, int) or self.unit_bytes < 1:
            raise InvalidOption(f"unit_bytes is {self.unit_bytes!r}; give a whole number of bytes from 1 up.")
        if self.reshard_after_forward is not None and not isinstance(self.reshard_after_forward, bool):
            raise InvalidOption(f"reshard_after_forward is {self.reshard_after_forward!r}; give True, False or None.")
