"""What runs before each forward and each backward of a sharded module, however it is called."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from shard_core import SetupError
from shard_core.backend import check_called_alike, check_used_alike, inside_objects, move_hooks
from shard_xla import _versions
from shard_xla.collectives import ReduceScatter
from shard_xla.strategy.full_parameter import FullParameter
from shard_xla.strategy.units import units_of

if TYPE_CHECKING:
    from torch import nn

    from shard_core.backend import Collectives, ParameterNames


class FullParameterHooks:
    """Watches a sharded module's forwards and backwards for what users did by hand before them.

    Upstream looks at a parameter once, when it is sharded, and takes every forward to be followed by one backward.

    Args:
        root: What is called.
        names: The names of its shards, by identity.

    Attributes:
        root: The same.
    """

    def __init__(self, root: nn.Module, names: Mapping[int, str]) -> None:
        self.root: Any = root
        self._units = list(units_of(root))
        self._of_units = [
            [
                FullParameter(name=names[id(shard)], full=full, shard=shard)
                for full, shard in _versions.full_and_shards(unit)
            ]
            for unit in self._units
        ]
        self._parameters = [each for own in self._of_units for each in own]
        self._deferring = False
        self._prepared = False
        self._outdated = False
        self._asked = False
        self._begun_past = False
        self._graph_kept = False
        self._agree: Callable[[str], None] = lambda _: None
        vars(root)["backward_ended"] = self._end_plain_backward
        for unit, own in zip(self._units, self._of_units, strict=True):
            vars(unit)["freeing"] = functools.partial(_keep_writes, weakref.ref(unit), own)
        # Held by the module alone, so that both are freed at once.
        root.register_forward_pre_hook(self._before_forward)
        root.register_forward_hook(self._after_forward)

    def take_users_hooks(self, names: ParameterNames) -> None:
        """Have the gradients that whole parameters get go through hooks that users put on them before setup.

        Args:
            names: The parameters of before.
        """
        wholes = {each.name: each.full for each in self._parameters}
        for parameter in names.parameters():
            move_hooks(parameter, wholes[names.of(parameter)])

    def full_of(self, shard: torch.Tensor) -> torch.Tensor | None:
        """Find the whole parameter of a shard of this module."""
        return next((each.full for each in self._parameters if each.shard is shard), None)

    @contextlib.contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep whole parameters and whole gradients from one micro-batch to the next inside."""
        self._end_abandoned()
        self._deferring = True
        try:
            with self.root.no_sync():
                yield
        finally:
            self._deferring = False

    @contextlib.contextmanager
    def backward(self) -> Iterator[None]:
        """Make the first gradient that comes inside prepare a backward, whose gradients the strategy sends."""
        if not self._deferring:  # else nothing is sent
            self._agree("a backward")
        self._asked = True
        self._begin_backward()
        if self._graph_kept:  # of gradients: it reads frozen weights, freed since, before it comes to any output's hook
            self._graph_kept = False
            for unit in self._units:
                _versions.gather(unit)
        try:
            yield
        finally:
            self._asked = False

    def _end_abandoned(self) -> None:
        """End a backward past the strategy that an exception has ended; inside one, units refuse to be called."""
        if self._begun_past:
            self.drop_unfinished()

    def _begin_backward(self) -> None:
        self._prepared = False
        for parameter in self._parameters:
            parameter.begin_backward()

    def _end_plain_backward(self) -> None:
        """Send what a backward past the strategy has made for units of which it has not reached everything."""
        self._begun_past = False
        if self._asked:  # the strategy does, once ranks have compared what they have used
            return
        for unit in self._units:
            if isinstance(unit.reduce_scatter_op, ReduceScatter):
                unit.reduce_scatter_op.flush()
        if self._deferring:
            self._show_kept()
        self._begin_backward()

    def used(self) -> list[tuple[str, bool]]:
        """List the parameters by name, and whether this backward or earlier ones have left a gradient to be sent."""
        if self._deferring:
            return []
        return [*_used(self._parameters), *((each.name, self._prepared and each.waits) for each in self._parameters)]

    def compare_ranks(self, collectives: Collectives) -> None:
        """Have ranks compare which unit they gather, and what their losses have used of one whose gradients they send.

        Args:
            collectives: Of all ranks.
        """
        if collectives.world_size == 1:
            return
        self._agree = functools.partial(check_called_alike, collectives=collectives)
        for unit, own in zip(self._units, self._of_units, strict=True):
            if isinstance(unit.reduce_scatter_op, ReduceScatter):
                unit.reduce_scatter_op.check = functools.partial(_check, collectives, own)
                vars(unit)["gathering"] = functools.partial(_check_gathered, collectives, weakref.ref(unit), own)

    def end_backward(self) -> None:
        """Show that gradients are kept on this rank, or send those that this backward, the last, has not reached."""
        prepared, self._prepared = self._prepared, False
        if self._deferring:
            self._show_kept()
            return
        for unit, own in zip(self._units, self._of_units, strict=True):
            kept = [parameter for parameter in own if parameter.waits]
            if kept and prepared:
                _versions.send_gradients(unit, [parameter.full for parameter in kept])

    def _show_kept(self) -> None:
        """Show in the shards which gradients are kept, so that who throws them away there is noticed."""
        for parameter in self._parameters:
            if parameter.waits:
                parameter.show_gradient()

    def drop_unfinished(self) -> None:
        """Throw away all gradients, and end a backward that an exception has ended."""
        for parameter in self._parameters:
            parameter.drop_gradient()
        self._begun_past = self._prepared = False
        _versions.end_backward(self.root)

    def check_sent(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that no gradient is still kept on this rank of what an optimizer steps.

        Args:
            optimizer: One over shards.

        Raises:
            SetupError: If the last backward outside of what keeps them came past this module.
        """
        held = {id(shard) for group in optimizer.param_groups for shard in group["params"]}
        kept = [each.name for each in self._parameters if each.waits and id(each.shard) in held]
        if kept:
            raise SetupError(
                f"the gradient of parameter {kept[0]!r} has waited on its rank since a backward inside "
                "no_backward_sync(), and the last backward outside did not come through its module; run one that does "
                "before a step."
            )

    def check_values(self) -> None:
        """Check that shards hold everything that is worth keeping.

        Raises:
            SetupError: If a whole parameter was changed instead, when it was away.
        """
        self._keep_writes()
        for parameter in self._parameters:
            # Whoever notices a change first, the next forward is to gather anew.
            self._outdated |= parameter.follow_values()

    def _keep_writes(self) -> None:
        for unit, own in zip(self._units, self._of_units, strict=True):
            _keep_writes(weakref.ref(unit), own)

    def _before_forward(self, root: nn.Module, args: Any) -> None:
        del root, args
        self._end_abandoned()
        self.check_values()
        if torch.is_grad_enabled():
            for parameter in self._parameters:
                parameter.follow_flag()
        # A change through ``data`` leaves no trace, so that only micro-batches of one step share what was gathered.
        if not self._deferring or self._outdated:
            for unit in self._units:
                _versions.forget_full_parameters(unit)
            self._outdated = False

    def _after_forward(self, root: nn.Module, args: Any, output: Any) -> None:
        del root, args
        if not self._deferring:
            self._agree("the end of a forward")
        self._keep_writes()  # before a step changes shards
        if torch.is_grad_enabled():
            for tensor in pytree.tree_leaves([inside_objects(output), output]):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._before_backward)

    def _before_backward(self, gradient: torch.Tensor) -> None:
        del gradient
        self._graph_kept = self._graph_kept or torch.is_grad_enabled()
        if self._prepared:
            return
        self._prepared = True
        self._begun_past = not self._asked
        self.check_values()
        for parameter in self._parameters:
            parameter.follow_flag()
        self._drop_discarded()
        for parameter in self._parameters:
            parameter.hide_gradient()
        for unit in self._units:
            _versions.prepare_backward(unit)

    def _drop_discarded(self) -> None:
        """Throw away gradients that are kept where users have thrown away what shards show for them.

        Raises:
            SetupError: If they have changed something, or thrown away some. All is gone then, too, or a later step
                would be taken with it.
        """
        if not any(parameter.touched for parameter in self._parameters):
            return
        kept = [parameter.name for parameter in self._parameters if parameter.drop_gradient()]
        if kept:
            raise SetupError(
                f"gradients were changed, or some of them thrown away, {kept[0]!r} for one not, while they wait for "
                "the end of no_backward_sync(), where nothing reaches them; all of these micro-batches are thrown "
                "away: begin them anew, and change gradients after the last backward, which is outside."
            )


def _keep_writes(unit: weakref.ref[Any], own: Sequence[FullParameter]) -> None:
    """Write to a unit's shards what was written to its whole parameters."""
    for parameter in own:
        parameter.keep_writes(functools.partial(_versions.part_of, unit()))


def _used(parameters: Sequence[FullParameter]) -> list[tuple[str, bool]]:
    return [(each.name, each.reached) for each in parameters]


def _check_gathered(collectives: Collectives, unit: weakref.ref[Any], own: Sequence[FullParameter]) -> None:
    """Compare which unit ranks gather, and what of it: deferred backwards let go of what they have used alone."""
    gathered = {id(shard) for shard in _versions.shards_to_gather(unit())}
    if own:
        used = [(each.name, id(each.shard) in gathered) for each in own]
        check_used_alike(used, collectives, at=f"the unit of {own[0].name!r}")


def _check(collectives: Collectives, own: Sequence[FullParameter]) -> None:
    check_used_alike(_used(own), collectives, at=f"the message of the unit of {own[0].name!r}")


def call_through(module: nn.Module, root: nn.Module) -> None:
    """Make a call of the user's own module one of the unit that gathers its parameters; teardown undoes it.

    Args:
        module: The user's.
        root: The unit around it.
    """
    # Held weakly, as the module is by the unit: both are freed at once.
    own, around = weakref.ref(module), weakref.ref(root)

    def call(*args: Any, **kwargs: Any) -> Any:
        inside, unit = own(), around()
        assert inside is not None, "it is what was called"
        if unit is None or unit.running:
            return _versions.plain_call(inside, *args, **kwargs)
        return unit(*args, **kwargs)

    _versions.exchange_call(module, call)
