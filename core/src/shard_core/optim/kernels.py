"""Which of torch's kernels an optimizer steps with, where its user left that open."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shard_core.optim.classification import why_not_elementwise

#: Settings of a group that choose how torch computes a step, the fastest first; None leaves the choice open.
KERNELS = ("fused", "foreach")
#: Bytes of an element in which another order of rounding stays within the bounds of parity.
_WIDE_BYTES = 4
#: By optimizer: how many groups it had, and the setting under which it steps.
_decided: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, Mapping[str, bool]]] = weakref.WeakKeyDictionary()


def is_torch_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer steps as torch wrote it: an overridden step may do more than torch's does.

    Args:
        optimizer: The user's.
    """
    return type(optimizer).step.__module__.startswith("torch.optim.")


def leaves_kernel_open(group: Mapping[str, Any]) -> bool:
    """Return whether a group leaves it to torch how its step is computed.

    Args:
        group: One of an optimizer's.
    """
    return all(group.get(kernel) is None for kernel in KERNELS)


def fastest_kernel(
    optimizer: torch.optim.Optimizer, device: torch.device, among: Sequence[str] = KERNELS
) -> Mapping[str, bool]:
    """Choose the fastest kernel that nobody ruled out, neither the user nor torch.

    Args:
        optimizer: One of torch's own.
        device: Where to try kernels.
        among: Those to choose from, the fastest first.

    Returns:
        The setting for its groups; none if a group chose for itself, or no kernel works with their settings.
    """
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    if not all(map(leaves_kernel_open, groups)) or not all(each.is_floating_point() for each in parameters):
        return {}
    # In few bits a fused kernel rounds less often than torch's loop: results would differ from other strategies'.
    rounds_alike = all(each.dtype.itemsize >= _WIDE_BYTES for each in parameters)
    for kernel in among:
        known = all(kernel in group for group in groups) and (rounds_alike or kernel != "fused")
        if known and why_not_elementwise(optimizer, device, {kernel: True}) is None:
            return {kernel: True}
    return {}


@contextlib.contextmanager
def zeroing_one_by_one(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Keep ``zero_grad`` from a kernel that takes either DTensors or plain tensors, where an optimizer holds both.

    It reads the default, which is there again afterwards: groups that are added later take it for their steps.

    Args:
        optimizer: The user's, over the module's parameters as setup has left them, groups that came later included.
    """
    chosen = {kernel: True for kernel in KERNELS if optimizer.defaults.get(kernel)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if len({isinstance(parameter, DTensor) for parameter in parameters}) > 1:
        optimizer.defaults.update(dict.fromkeys(chosen))
    try:
        yield
    finally:
        optimizer.defaults.update(chosen)


@contextlib.contextmanager
def inside_step(
    optimizer: torch.optim.Optimizer, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Call functions around a step, inside of all hooks on it: after the last pre-hook, before the first post-hook.

    Args:
        optimizer: The user's. Within the context, call ``step`` once.
        enter: Called before the step; what it is given does not matter.
        leave: Called after it; again at the end, in case the step failed.
    """
    before, after = optimizer.register_step_pre_hook(enter), optimizer.register_step_post_hook(leave)
    hooks = after.hooks_dict_ref()
    assert hooks is not None
    hooks.move_to_end(after.id, last=False)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        leave()


def can_use_kernel(setting: Mapping[str, bool], optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a group may use a kernel for its next step.

    It may not if it has chosen for itself, nor a fused one if only some of its parameters have met a gradient before:
    torch's fused SGD fails there, its loops do not. Nor lists under Nesterov's momentum, which torch adds to the
    gradients themselves there: whoever looks at them after the step, or steps with them again, would find others.

    Args:
        setting: The kernel, as ``fastest_kernel`` returns it.
        optimizer: The user's.
        group: One of its groups.
    """
    if not setting or not leaves_kernel_open(group):
        return False
    if not setting.get("fused"):
        return not group.get("nesterov")
    state = optimizer.state
    begun = {
        any(isinstance(slot, torch.Tensor) for slot in state.get(parameter, {}).values())
        for parameter in group["params"]
        if parameter.grad is not None
    }
    return len(begun) < 2


@contextlib.contextmanager
def fast_step(optimizer: torch.optim.Optimizer, device: torch.device, among: Sequence[str] = KERNELS) -> Iterator[None]:
    """Set one of torch's own optimizers to the fastest kernel that nobody ruled out, for one step.

    Groups, and hooks on the step, see what they would without it.

    Args:
        optimizer: The user's, over plain tensors. Inside, call ``step`` once.
        device: Where to try kernels.
        among: Those to choose from, the fastest first.
    """
    groups, setting = _decided.get(optimizer, (0, {}))
    if groups != len(optimizer.param_groups):
        setting = fastest_kernel(optimizer, device, among) if is_torch_step(optimizer) else {}
        _decided[optimizer] = len(optimizer.param_groups), setting
    changed: list[dict[str, Any]] = []

    def enter(*_: object) -> None:
        changed.extend(each for each in optimizer.param_groups if can_use_kernel(setting, optimizer, each))
        for group in changed:
            group.update(setting)
            if setting.get("fused"):
                _move_counters(optimizer, group["params"])

    def leave(*_: object) -> None:
        for group in changed:
            group.update(dict.fromkeys(setting))
        changed.clear()

    with inside_step(optimizer, enter, leave):
        yield


def fused_step_counter(counter: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Move a counter of steps to where the fused kernels count; others count in host memory, in the default dtype.

    Args:
        counter: The state ``step`` of a parameter.
        parameter: The parameter.
    """
    return counter.to(parameter.device, torch.float32)


def _move_counters(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = fused_step_counter(state["step"], parameter)
