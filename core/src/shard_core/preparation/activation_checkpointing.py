"""Activation checkpointing: what a layer computes in forward is computed again in backward instead of being kept."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
)

from shard_core._versions import draws_random_numbers, is_operation, written_arguments
from shard_core.errors import InvalidOption
from shard_core.preparation.recomputed_buffers import RecomputedBuffers
from shard_core.preparation.submodules import chosen_layers

if TYPE_CHECKING:
    from torch import nn

_Contexts = tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]

_OPTION = "activation_checkpointing"
_ANSWERS = (
    *(CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE),
    *(CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE),
)


def recompute(module: nn.Module, given: Any) -> None:
    """Checkpoint the activations of some submodules: only their inputs are kept between forward and backward.

    Their forwards are exchanged, nothing is wrapped: parameters keep their names, and hooks of the engine, which
    stand outside of the forward, do not run again in backward.

    Args:
        module: The whole module.
        given: The option ``activation_checkpointing``: a class of submodules, several, or a function that decides for
            each submodule; or these as ``"layers"`` of a dict whose ``"policy"`` says which operations inside them
            keep their results: names of operations, or a function of torch's signature.

    Raises:
        InvalidOption: If a class matches no submodule or has no forward, a function chooses none, or the policy names
            what is no operation.
    """
    layers, policy = (given["layers"], given.get("policy")) if isinstance(given, Mapping) else (given, None)
    recomputed, recomputed_with_buffers = _recomputing(None if policy is None else _selecting(policy))

    def forward_of(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Nothing in here belongs to one layer, so that compiled layers of a class share a graph.
        return recomputed(layer, type(layer).forward, layer, *args, **kwargs)

    def forward_with_buffers_of(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recomputed_with_buffers(layer, type(layer).forward, layer, *args, **kwargs)

    for layer in chosen_layers(_OPTION, layers, module):
        has_buffers = next(layer.buffers(), None) is not None
        if "forward" in vars(layer):
            # Somebody has exchanged it before; compiled, such a layer may need a graph of its own.
            run = functools.partial(recomputed_with_buffers if has_buffers else recomputed, layer, layer.forward)
            layer.forward = functools.update_wrapper(run, layer.forward)
        else:
            layer.forward = MethodType(forward_with_buffers_of if has_buffers else forward_of, layer)


def _recomputing(of_operations: Callable[[], _Contexts] | None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what runs a layer's forward twice, and what does so with a layer that has buffers."""
    kept = RecomputedBuffers()
    # Where there is nothing to say the keyword is left out: compilers take no other function for it than a policy's.
    given: dict[str, Any] = {} if of_operations is None else {"context_fn": of_operations}

    def contexts(layer: nn.Module) -> _Contexts:
        first, again = zip(kept.contexts(layer), (of_operations or noop_context_fn)(), strict=True)
        return _Both(*first), _Both(*again)

    def recomputed(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        del layer
        return checkpoint(forward, *args, use_reentrant=False, **given, **kwargs)

    def recomputed_with_buffers(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return recomputed(layer, forward, *args, **kwargs)
        of_layer = functools.partial(contexts, layer)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=of_layer, **kwargs)

    return recomputed, recomputed_with_buffers


class _Both(contextlib.AbstractContextManager[None]):
    """Two contexts in one, to be entered for each backward through a layer."""

    def __init__(self, *contexts: contextlib.AbstractContextManager[Any]) -> None:
        self._contexts = contexts
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> None:
        with contextlib.ExitStack() as entered:
            for context in self._contexts:
                entered.enter_context(context)
            self._entered = entered.pop_all()

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)


def _selecting(policy: Collection[Any] | Callable[..., Any]) -> Callable[[], _Contexts]:
    """Return what makes the contexts in which operations are kept as a policy says."""
    decide = policy if callable(policy) else _keeping(policy)
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_decided, decide))


def _keeping(names: Collection[str]) -> Callable[..., CheckpointPolicy]:
    kept = frozenset(operation for name in names for operation in _named(name))

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del context, args, kwargs
        return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _named(name: str) -> list[Any]:
    """Find operations by name: ``aten.mm.default``, or ``aten.mm`` for all its overloads."""
    found: Any = torch.ops
    for part in name.split(".") if "." in name else ("higher_order", name):
        found = getattr(found, part, None)
    if is_operation(found):
        return [found]
    overloads = found.overloads() if hasattr(found, "overloads") else ()
    if not overloads:
        raise InvalidOption(
            f"{_OPTION} has a policy that names {name!r}, which is no operation of torch.ops; name one such as "
            "'aten.mm', or with its overload, 'aten.mm.default'."
        )
    return [getattr(found, overload) for overload in overloads]


def _decided(decide: Callable[..., Any], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Ask a policy, except where keeping a result would change what is computed after it."""
    answer = decide(context, operation, *args, **kwargs)
    if isinstance(answer, bool):
        answer = CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    if answer not in _ANSWERS:
        raise InvalidOption(
            f"{_OPTION} has a policy that answers {answer!s:.60} for {operation}; let it answer True or False, or "
            f"{', '.join(each.name for each in _ANSWERS)} of torch.utils.checkpoint.CheckpointPolicy."
        )
    # What is kept does not run again: the tensor it writes to stays as it was, the generator does not move on.
    if written_arguments(operation) or draws_random_numbers(operation, args, kwargs):
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy(answer)
