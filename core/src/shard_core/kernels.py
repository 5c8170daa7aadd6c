"""Which of torch's kernels an optimizer steps with, where its user left that open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shard_core.elementwise import why_not_elementwise

if TYPE_CHECKING:
    import torch

#: Settings of a group that choose how torch computes a step, the fastest first; None leaves the choice open.
KERNELS = ("fused", "foreach")
#: Bytes of an element in which another order of rounding stays within the bounds of parity.
_WIDE = 4


def torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer steps as torch wrote it: an overridden step may know more than torch's does.

    Args:
        optimizer: The user's.
    """
    return type(optimizer).step.__module__.startswith("torch.optim.")


def leaves_open(group: Mapping[str, Any]) -> bool:
    """Tell whether a group leaves it to torch how its step is computed.

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
    if not all(map(leaves_open, groups)) or not all(each.is_floating_point() for each in parameters):
        return {}
    # In few bits a fused kernel rounds less often than torch's loop: results would differ from other strategies'.
    rounds_alike = all(each.dtype.itemsize >= _WIDE for each in parameters)
    for kernel in among:
        known = all(kernel in group for group in groups) and (rounds_alike or kernel != "fused")
        if known and why_not_elementwise(optimizer, device, {kernel: True}) is None:
            return {kernel: True}
    return {}


@contextlib.contextmanager
def inside_step(
    optimizer: torch.optim.Optimizer, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """Prepare a step where no hook on it can see: after the last of those before, ahead of the first of those after.

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
