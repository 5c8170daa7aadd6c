"""Private names of torch that this distribution leans on, with the versions they were checked on and when they can go.

``CustomPolicy._run_policy``: which modules a policy made of a function chooses; its neighbour ``ModuleWrapPolicy`` can
be called. Checked on torch 2.9.0 and 2.13.0. It can go when ``CustomPolicy`` can be called too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.fsdp.wrap import CustomPolicy

__all__ = ["custom_policy_targets"]


def custom_policy_targets(policy: CustomPolicy, module: nn.Module) -> dict[nn.Module, dict[str, Any]]:
    """Return the modules a policy chooses, with what each is to have of its own."""
    return policy._run_policy(module, ignored_modules=set(), root_kwargs={})
