"""The true global norm of gradients however they are laid out, and scaling and clipping them in place."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from shard_core._versions import gradient_hooks, remove_gradient_hooks, tree_leaves
from shard_core.errors import InvalidOption

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement
    from torch.utils.hooks import RemovableHandle

    from shard_core.collectives.interface import Collectives


@dataclasses.dataclass(frozen=True)
class LocalGradient:
    """This rank's part of one parameter's gradient.

    Attributes:
        tensor: The part, changed in place by scaling and clipping; may be empty.
        sharded_over: The process groups whose other ranks hold the other parts; empty if this rank
            holds all of it, as every rank does that holds it too.
    """

    tensor: torch.Tensor
    sharded_over: tuple[Any, ...] = ()


def local_gradients(parameters: Iterable[torch.Tensor]) -> list[LocalGradient]:
    """Collect the gradients of plain and DTensor parameters.

    Args:
        parameters: Parameters; those without a gradient are left out.

    Returns:
        This rank's parts, sharing memory with ``.grad``.
    """
    gradients = []
    groups: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    # Without autograd a DTensor shows its local tensor at once.
    with torch.no_grad():
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                if any(isinstance(placement, Partial) for placement in gradient.placements):
                    whole = [Replicate() if isinstance(p, Partial) else p for p in gradient.placements]
                    parameter.grad = gradient = gradient.redistribute(placements=whole)
                layout = gradient.device_mesh, gradient.placements
                if layout not in groups:
                    groups[layout] = _sharded_over(*layout)
                gradients.append(LocalGradient(gradient.to_local(), groups[layout]))
            elif gradient is not None:
                gradients.append(LocalGradient(gradient))
    return gradients


def _sharded_over(mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[Any, ...]:
    return tuple(
        mesh.get_group(axis) for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)
    )


def total_norm(gradients: Sequence[LocalGradient], norm_type: float, collectives: Collectives) -> torch.Tensor:
    """Compute the norm of all gradients as one vector, the same on every rank.

    Replicated gradients count once; each set of shards costs one reduction of one number per axis.

    Args:
        gradients: This rank's parts; every rank gives the parts of the same parameters.
        norm_type: Which p-norm; ``math.inf`` for the largest absolute value.
        collectives: Of all ranks.

    Returns:
        A 0-d tensor.

    Raises:
        InvalidOption: If ``norm_type`` is 0 and gradients are sharded.
    """
    layouts: dict[tuple[int, ...], list[LocalGradient]] = {}
    for gradient in gradients:
        layouts.setdefault(tuple(map(id, gradient.sharded_over)), []).append(gradient)
    norms = [_norm_of_layout(parts, norm_type, collectives) for parts in layouts.values()]
    if not norms:
        return torch.zeros(())
    if len(norms) == 1:
        return norms[0]
    # Offloaded shards stand in host memory beside what is not sharded, which stays on the device.
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    return total


def _norm_of_layout(parts: Sequence[LocalGradient], norm_type: float, collectives: Collectives) -> torch.Tensor:
    filled = [part.tensor for part in parts if part.tensor.numel()]
    norm = torch.nn.utils.get_total_norm(filled, norm_type) if filled else parts[0].tensor.new_zeros(())
    groups = parts[0].sharded_over
    if not groups:
        return norm
    if not norm_type:
        raise InvalidOption(
            "norm_type=0 counts the gradients that are not zero, of which ranks hold shards here; give another."
        )
    if math.isinf(norm_type):
        # Of a number and NaN, gloo's maximum is either.
        lost = norm.isnan()
        largest = torch.stack([norm.masked_fill(lost, 0.0), lost.to(norm.dtype)])
        for group in groups:
            largest = collectives.all_reduce(largest, group, "max")
        return torch.where(largest[1] > 0, math.nan, largest[0])
    # Powers of norms are summed in float64, where they neither overflow nor lose what small shards add.
    power = norm.double() ** norm_type
    for group in groups:
        power = collectives.all_reduce(power, group, "sum")
    return (power ** (1.0 / norm_type)).to(norm.dtype)


def are_alike(gradients: Sequence[LocalGradient], collectives: Collectives) -> bool:
    """Return whether gradients that every rank holds are the same on all, up to rounding; every rank calls this.

    Args:
        gradients: This rank's parts; those that are sharded are left out.
        collectives: Of all ranks.
    """
    if collectives.world_size == 1:
        return True
    whole = [each.tensor for each in gradients if not each.sharded_over and each.tensor.numel()]
    sparse = [each.coalesce() for each in whole if each.is_sparse]
    values = [each for each in whole if not each.is_sparse] + [each.values() for each in sparse]
    size, total = 0.0, 0.0
    if values:
        norm = torch.nn.utils.get_total_norm(values)
        sums = torch.stack([_real_sum(each).to(norm.device) for each in values])
        size, total = torch.stack([norm, sums.sum()]).tolist()
    rows = sum(int(each.indices().sum()) for each in sparse)
    counts = float(len(whole)), float(sum(each.indices().shape[1] for each in sparse)), float(rows)
    mine = torch.tensor([size, total, *counts], dtype=torch.float64)
    most, least = collectives.all_reduce(torch.stack([mine, -mine]), reduce_op="max")
    apart = most + least
    rounded = 1e-5 * torch.stack([most[:2], least[:2]]).abs().max()
    # What is not a number is no reason to refuse.
    return not bool(apart[2:].any()) and not bool(apart[:2].max() > rounded)


def _real_sum(values: torch.Tensor) -> torch.Tensor:
    total = values.sum()
    return torch.view_as_real(total).sum() if total.is_complex() else total


def scale(gradients: Sequence[LocalGradient], factor: float) -> None:
    """Multiply gradients in place.

    Args:
        gradients: This rank's parts.
        factor: The same on every rank.
    """
    for gradient in gradients:
        gradient.tensor.mul_(factor)


def clip_norm(gradients: Sequence[LocalGradient], max_norm: float, norm: torch.Tensor) -> None:
    """Scale gradients down in place so that their norm is at most ``max_norm``.

    Args:
        gradients: This rank's parts.
        max_norm: The bound.
        norm: What ``total_norm`` returned.
    """
    torch.nn.utils.clip_grads_with_norm_([_carrier(part.tensor) for part in gradients], max_norm, norm)


def _carrier(gradient: torch.Tensor) -> torch.Tensor:
    # torch clips what parameters carry, and all in one kernel; this stands in for the local parameter.
    carrier = gradient.detach()
    carrier.grad = gradient
    return carrier


def clip_values(gradients: Sequence[LocalGradient], clip_val: float) -> None:
    """Clamp every gradient element in place to ``[-clip_val, clip_val]``.

    Args:
        gradients: This rank's parts.
        clip_val: The bound.
    """
    for gradient in gradients:
        gradient.tensor.clamp_(-clip_val, clip_val)


def all_finite(gradients: Sequence[LocalGradient]) -> bool:
    """Return whether this rank's parts hold neither infinities nor NaNs.

    Args:
        gradients: This rank's parts.

    Returns:
        The answer for this rank alone.
    """
    filled = [gradient.tensor for gradient in gradients if gradient.tensor.numel()]
    return not filled or bool(torch.nn.utils.get_total_norm(filled, math.inf).isfinite())


def graph_nodes(loss: torch.Tensor) -> Iterator[Node]:
    """Iterate over the nodes of a loss's graph, each once, what is near the loss first.

    Args:
        loss: Any tensor.

    Example:
        >>> [node.name() for node in graph_nodes(torch.ones(2, requires_grad=True).exp().sum())]
        ['SumBackward0', 'ExpBackward0', 'torch::autograd::AccumulateGrad']
    """
    seen: dict[Node | None, None] = {loss.grad_fn: None}
    nodes = list(seen)
    for node in nodes:  # grows while it is gone through
        if node is None:
            continue
        yield node
        for other, _ in node.next_functions:
            if other not in seen:
                seen[other] = None
                nodes.append(other)


def on_gradient(parameter: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> RemovableHandle:
    """Register a hook on a parameter's gradient, be it trained or not.

    Args:
        parameter: A leaf, of a dtype that may have gradients.
        hook: Called with the parameter each time a gradient has been added.

    Returns:
        What removes the hook.
    """
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes no hooks else, and what is frozen may be unfrozen later
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trained)
    return handle


Hooks = Mapping[int, Callable[[torch.Tensor], torch.Tensor | None]]
"""What users have registered by ``Tensor.register_hook``, in the order in which it is called."""


def call_hooks(hooks: Hooks, gradient: torch.Tensor) -> torch.Tensor:
    """Call hooks of ``Tensor.register_hook`` one after the other, as autograd does.

    Args:
        hooks: What is registered just now.
        gradient: What the first is given.

    Returns:
        What the last has left.
    """
    for hook in list(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


class MovedHooks:
    """What one tensor's gradients go through since its hooks were moved from another tensor.

    Args:
        hooks: These, as long as nothing has removed them.
        call: Calls them with a gradient, and returns what they leave of it.
    """

    def __init__(self, hooks: Hooks, call: Callable[[Hooks, torch.Tensor], torch.Tensor]) -> None:
        self._hooks, self._call = hooks, call

    def __bool__(self) -> bool:
        """Return whether there are any left."""
        return bool(self._hooks)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        """Call them."""
        return self._call(self._hooks, gradient) if self._hooks else None


def move_hooks(
    parameter: torch.Tensor, to: torch.Tensor, call: Callable[[Hooks, torch.Tensor], torch.Tensor] = call_hooks
) -> None:
    """Route another tensor's gradients through the hooks of a parameter; what removes one from there still does.

    Args:
        parameter: What setup takes out of the module; calls none of its hooks any more.
        to: What stands in its place.
        call: Calls the hooks with a gradient of that, and returns what they leave of it.
    """
    hooks = gradient_hooks(parameter)
    if not hooks:
        return
    remove_gradient_hooks(parameter)
    trained = to.requires_grad
    to.requires_grad_(True)  # torch takes no hooks else, and what is frozen may be unfrozen later
    to.register_hook(MovedHooks(hooks, call))
    to.requires_grad_(trained)


def sparse_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a module whose gradients are sparse, by name: those of embeddings that were made so."""
    return {
        f"{name}.weight".removeprefix("."): part.weight
        for name, part in module.named_modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
    }


_DEEPEST = 4
"""How many objects deep tensors of an output may stand inside one another."""
_CLOSED = (type, types.ModuleType, torch.nn.Module)
"""What holds tensors that are none of an output's."""


def inside_objects(output: Any) -> list[torch.Tensor]:
    """List the tensors to train through that are attributes of objects in an output, where engines look for none.

    Objects in objects are looked into a few deep: one of them may lead to all that a process holds.

    Args:
        output: What a forward has returned.

    Returns:
        Those with gradients; without what tuples, dicts and other containers that torch opens hold themselves.

    Example:
        >>> class Output:
        ...     def __init__(self, loss):
        ...         self.loss = loss
        >>> loss = torch.ones(2, requires_grad=True).sum()
        >>> len(inside_objects((loss, Output(loss))))
        1
    """
    found: list[torch.Tensor] = []
    seen: set[int] = set()
    leaves = tree_leaves(output)
    # Level by level: a function that called itself would hold itself, and what it found, until garbage is collected.
    for depth in range(_DEEPEST + 1):
        inside: list[Any] = []
        for each in leaves:
            if isinstance(each, torch.Tensor):
                if depth and each.requires_grad:
                    found.append(each)
            elif (
                depth < _DEEPEST
                and id(each) not in seen
                and hasattr(each, "__dict__")
                and not isinstance(each, _CLOSED)
            ):
                seen.add(id(each))
                inside += vars(each).values()
        leaves = tree_leaves(inside)
    return found


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may have gradients, by its dtype and by where it was made."""
    return (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_inference()
