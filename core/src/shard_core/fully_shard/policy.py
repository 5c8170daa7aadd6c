"""Which submodules become units because a wrapping policy says so, or torch's ``wrap`` has marked them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp.wrap import CustomPolicy, enable_wrap

from shard_core._versions import custom_policy_targets
from shard_core.errors import InvalidOption
from shard_core.preparation.submodules import has_forward, of_classes

if TYPE_CHECKING:
    from torch import nn


def chosen_by(policy: Any, module: nn.Module) -> list[nn.Module]:
    """Return the submodules that a policy makes units.

    Args:
        policy: Classes, or a policy of ``torch.distributed.fsdp.wrap``, or a function of its signature.
        module: The whole module.

    Returns:
        The submodules, without containers that never run.

    Raises:
        InvalidOption: If a class matches no submodule, or none with parameters, or the policy wants units that differ
            in what no unit can have of its own.

    Example:
        >>> import functools
        >>> from torch import nn
        >>> from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 9))
        >>> chosen_by(functools.partial(size_based_auto_wrap_policy, min_num_params=50), model)
        [Linear(in_features=9, out_features=9, bias=True)]
        >>> chosen_by({nn.Bilinear}, model)
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: auto_wrap_policy names Bilinear, of which the model has none; did you mean \
'Linear'?
    """
    if isinstance(policy, Iterable):
        chosen = of_classes("auto_wrap_policy", policy, module)
        for kind in policy:
            if not any(next(part.parameters(), None) is not None for part in chosen if isinstance(part, kind)):
                raise InvalidOption(
                    f"auto_wrap_policy names {kind.__name__}, which has no parameters here, so nothing of it is a "
                    "unit; name the class of what holds them."
                )
        return chosen
    if isinstance(policy, CustomPolicy):
        targets = _by_custom(policy, module)
    else:
        targets = [part for part in _by_function(policy, module)[0] if part is not module]
    return [part for part in targets if has_forward(type(part))]


def _by_custom(policy: CustomPolicy, module: nn.Module) -> list[nn.Module]:
    targets = custom_policy_targets(policy, module)
    for part, overrides in targets.items():
        if overrides:
            raise InvalidOption(
                f"auto_wrap_policy gives {type(part).__name__} {', '.join(map(repr, sorted(overrides)))} of its own; "
                "options hold for all units alike, so let it return True or False."
            )
    return [part for part in targets if part is not module]


def _by_function(
    policy: Callable[..., bool], module: nn.Module, seen: set[nn.Module] | None = None
) -> tuple[list[nn.Module], int]:
    """Walk down where the function says so; return the chosen modules and how many elements they hold."""
    seen = set() if seen is None else seen
    seen.add(module)
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return [], 0
    found: list[nn.Module] = []
    wrapped = 0
    for child in module.children():
        if child not in seen:
            inside, held = _by_function(policy, child, seen)
            found += inside
            wrapped += held
    if policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        return [*found, module], numel
    return found, wrapped


class ManualUnits:
    """The submodules that users have wrapped.

    They are marked and not sharded at once: before setup nobody knows with what they share parameters, which
    optimizers hold them, or what their values will be.
    """

    def __init__(self) -> None:
        self._marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._enabled = False

    @contextlib.contextmanager
    def enabled(self) -> Iterator[None]:
        """Make ``torch.distributed.fsdp.wrap.wrap`` mark what it is given; torch refuses a context in a context."""
        if self._enabled:
            yield
            return
        self._enabled = True
        try:
            with enable_wrap(wrapper_cls=self._mark):
                yield
        finally:
            self._enabled = False

    def of(self, module: nn.Module) -> list[nn.Module]:
        """List the marked submodules of a module.

        Args:
            module: The whole module.
        """
        return [part for part in module.modules() if part in self._marked]

    def _mark(self, module: nn.Module, **overrides: Any) -> nn.Module:
        kind = type(module).__name__
        if overrides:
            raise InvalidOption(
                f"wrap() gives {kind} {', '.join(map(repr, sorted(overrides)))} of its own; options hold for all units "
                "alike, so give them to get_strategy()."
            )
        if not has_forward(type(module)):
            raise InvalidOption(f"wrap() was given a {kind}, which has no forward; wrap what it holds.")
        self._marked.add(module)
        return module
