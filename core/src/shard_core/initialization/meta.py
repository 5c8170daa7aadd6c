"""Modules that users built on the meta device: initialised by a function of theirs, or refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shard_core._versions import unset_fake_temporarily
from shard_core.errors import SetupError
from shard_core.initialization.recording import is_blank

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator


def needs_values(module: nn.Module, coordinator: Coordinator) -> bool:
    """Return whether a module has tensors on the meta device that nothing is recorded of; every rank calls this.

    Args:
        module: The whole module.
        coordinator: Of all ranks.

    Raises:
        SetupError: If ranks differ.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lacking = [name for name, tensor in tensors if tensor.is_meta]
    everywhere = coordinator.gather_objects(lacking)
    for rank, names in enumerate(everywhere):
        if names != everywhere[0]:
            name = sorted(set(names) ^ set(everywhere[0]))[0]
            raise SetupError(
                f"{name!r} is on the meta device on rank 0 or on rank {rank}, and not on the other; build alike on "
                "every rank, inside module_init_context(), and load weights after setup."
            )
    return bool(lacking)


def initialise(
    module: nn.Module, function: Callable[[nn.Module], object] | None, recording: contextlib.AbstractContextManager[Any]
) -> None:
    """Call a function for each submodule that has tensors on the meta device, and check that it initialises all.

    What it does is recorded, to be replayed shard by shard: no rank ever holds what it seems to make.

    Args:
        module: The whole module; what is recorded or has values is left alone.
        function: Given a submodule, puts its own parameters and buffers on a device and initialises them; None if
            there is none.
        recording: Inside which nothing is computed.

    Raises:
        SetupError: If a parameter or buffer is left without values.
    """
    shared: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for name, tensor in _own(part).items():
            shared.setdefault(id(tensor), []).append((part, name))
    with recording:
        for prefix, part in module.named_modules():
            before = _own(part)
            if not any(tensor.is_meta for tensor in before.values()):
                continue
            if function is None:
                lacking = next(name for name, tensor in before.items() if tensor.is_meta)
                raise SetupError(
                    f"{_joined(prefix, lacking)!r} is on the meta device, so nothing says what it holds; build inside "
                    "module_init_context() (empty_init=True if a checkpoint follows), or give param_init_fn."
                )
            _call(function, part, before)
            for name, old in before.items():
                if old.is_meta:
                    new = _given(_joined(prefix, name), getattr(part, name))
                    for owner, other in shared[id(old)]:
                        setattr(owner, other, new)


def _call(function: Callable[[nn.Module], object], part: nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Call a function on a submodule, and keep what has values: a tied parameter got them where it came first.

    Functions empty and fill all that a submodule holds, so they meet stand-ins for what is to be kept.
    """
    kept = {name: tensor for name, tensor in before.items() if not tensor.is_meta}
    for name, tensor in kept.items():
        with unset_fake_temporarily():
            stand_in = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        setattr(part, name, nn.Parameter(stand_in, requires_grad=tensor.requires_grad) if is_parameter else stand_in)
    with _OnHost():
        function(part)
    for name, tensor in kept.items():
        setattr(part, name, tensor)


def _given(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta or is_blank(tensor):
        where = "on the meta device" if tensor.is_meta else "without values"
        raise SetupError(
            f"param_init_fn leaves {name!r} {where}; let it initialise every parameter and buffer of the module it is "
            "given, or build inside module_init_context(), which needs no such function."
        )
    return tensor


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _own(part: nn.Module) -> dict[str, torch.Tensor]:
    """List the parameters and buffers a module itself holds."""
    return {
        **dict(part.named_parameters(recurse=False, remove_duplicate=False)),
        **dict(part.named_buffers(recurse=False, remove_duplicate=False)),
    }


class _OnHost(TorchFunctionMode):
    """Makes tensors on the CPU in functions that name a device; setup moves shards to their device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)
