"""Private names that this distribution leans on, with the versions they were checked on and when they can go.

All of torch's were checked on torch 2.9.0 and 2.13.0.

``FakeTensorMode`` and what belongs to it: tensors that have a shape, a dtype and a CPU device but no values. They can
go when torch documents fake tensors; the ``meta`` device is no substitute, on which libraries initialise nothing.

``FakeTensorMode.fake_tensor_converter.meta_converter.tensor_memo``: holds weak references to fake tensors, and because
of them ``Module.to`` refuses to convert a module. It can go when ``Module.to`` converts them.

``torch.nn.init._no_grad_trunc_normal_``: what every truncated normal of torch ends in; it draws until no value lies
outside, so it looks at values. It can go when ``trunc_normal_`` looks at no values, or offers itself to
``__torch_function__`` as ``normal_`` does.

``torch.load`` itself: under a ``FakeTensorMode`` it gives tensors that nothing fills. It can go when torch loads values
there, or offers ``load`` to ``__torch_function__``.

``torch.nn.Module._forward_pre_hooks`` and ``_forward_hooks``: which hooks of a module are ``fully_shard``'s, which know
when all layers of a unit have run. They can go when a unit may be told so.

``torch.Generator._cdata``: which generator an object stands for, of several. It can go when generators compare equal.

``torch._ops.OpOverload``, its ``_schema``, and ``HigherOrderOperator``: what an operation is, and which arguments it
takes and writes to. They can go when torch says so in public.

``torch.distributed.distributed_c10d._get_default_store``: the store of a process group that somebody else made, over
which ranks can name the absent. It can go when a process group shows its store; a store of our own would need another
open port, and would die with rank 0 while others still read from it.

``torch.distributed.distributed_c10d._abort_process_group``: leaves all groups without waiting for other ranks, NCCL's
in an order that does not deadlock. It can go when ``destroy_process_group`` may be told to abort.

``Module._compiled_call_impl``, ``_orig_mod`` and ``_torchdynamo_orig_callable``: what ``Module.compile()``,
``torch.compile(module)`` and ``torch.compile(module.forward)`` leave on a module. They can go when torch shows what is
compiled; importing its compiler only to ask takes seconds.

``Tensor._version``: how often a tensor was changed in place. ``Tensor._backward_hooks`` and
``_post_accumulate_grad_hooks``: what users have registered on one, which goes with it when a module gets others, or is
called with the gradients of others. They can go when torch shows them in public.

``METADATA_CLASSES`` and what stands beside it: the classes that the ``.metadata`` of ``torch.distributed.checkpoint``
consist of, two of them private. They are never imported; a pickle that names others is refused. They can go when torch
writes its metadata as data.

``TorchDispatchMode``: a context that sees every operation, by which memory on the CPU is measured, and strangers'
optimizers are kept from collectives and endless work when tried out. It can go when torch documents it.

``IterableDataset._distributed`` of Hugging Face's ``datasets``: over how many ranks ``split_dataset_by_node`` has split
a stream. Nothing is imported for it. Checked on datasets 5.2.0. It can go when a dataset shows it in public; without
it, users pass ``shard_stream=False``.

``CustomPolicy._run_policy``: which modules a policy made of a function chooses; its neighbour ``ModuleWrapPolicy`` can
be called. It can go when ``CustomPolicy`` can be called too.

``get_model_conversion_mapping`` of ``transformers.conversion_mapping``, and ``rename_source_key`` and
``dot_natural_key`` of ``transformers.core_model_loading``: how the files of a model become what its module holds; the
classes of what they return, ``WeightConverter`` and ``WeightRenaming``, and their methods ``add_tensor`` and
``convert``. Imported where such a model is loaded. Checked on transformers 5.23.0. They can go when transformers
converts a state dict in public without building the model whole.

``torch._C._current_graph_task_id``: which backward runs just now, if one does; activation checkpointing calls modules
again in it. ``Variable._execution_engine``: what to call at its end. They can go when torch shows both in public.
``torch.utils._pytree.tree_leaves``: what torch looks into for tensors of outputs. It can go when torch offers it.

``FSDPModule._get_fsdp_state``, and of what it returns ``_fsdp_param_groups`` (``_fsdp_param_group`` in torch 2.9.0) and
their ``fsdp_params`` with ``_unsharded_param`` and ``sharded_param``: the tensors that units compute with, at which
graphs end, and what they stand for. They can go when torch says which parameter such a tensor stands for. Beside them
``unsharded_accumulated_grad`` and ``_partial_reduce_output``: where deferred gradients wait, to throw them away. They
can go when torch does so in ``zero_grad``. ``post_backward`` and ``finalize_backward``, to reduce once in a backward
what was called in parts: they can go when torch adds up deferred gradients by parameter. ``is_unsharded``, to notice
gradients that nothing sends, ``_all_gather_result``, to notice what was gathered ahead of a call that does not come,
and ``reset_sharded_param``, by which a unit reads its shards anew.
``_root_post_backward_final_callback``, by which units begin anew after a backward that an exception has ended: it can
go when all have ``reset_iter_state``, of torch 2.13, and ``_is_root``, None before a unit has run.

``DTensor._local_tensor`` and ``_spec``: what a DTensor consists of, which torch leaves as it was when ``.data`` is
assigned (pytorch/pytorch#157391), so that core gives ``DTensor`` a setter that does not. Both, and
``reset_sharded_param``, can go when torch's own setter reaches the shard and the units.

``DTensor._op_dispatcher`` and ``torch._C._clear_DTensor_sharding_propagator_cache`` (not in torch 2.9.0): caches of how
results of operations are laid out, over meshes whose process groups may be gone, and equal others. They can go when
``destroy_process_group`` clears them, or meshes over other groups are not equal.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch.distributed.fsdp.wrap import CustomPolicy
    from torch.distributed.tensor import DTensor

# What is imported here for others to import from here; all that is defined below may be, too.
__all__ = ["FakeTensor", "FakeTensorMode", "TorchDispatchMode", "tree_leaves", "unset_fake_temporarily"]

#: The attribute that ``Module.compile()`` sets on a module.
COMPILED_CALL = "_compiled_call_impl"

#: (module, name) of the classes whose objects the metadata of a distributed checkpoint consist of.
METADATA_CLASSES = frozenset(
    [
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta"),
                *("TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        # The folder's own path, as whoever has saved it gave it.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
    ]
)
#: (module, name) of what makes a size, called with its numbers.
METADATA_SIZE = ("torch", "Size")
#: (module, name) of what makes a layout, called with its name.
METADATA_LAYOUT = ("torch.serialization", "_get_layout")

#: What ``FakeTensorMode`` raises for an operation whose result depends on values.
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


def custom_policy_targets(policy: CustomPolicy, module: torch.nn.Module) -> dict[torch.nn.Module, dict[str, Any]]:
    """Return the modules a policy chooses, with what each is to have of its own."""
    return policy._run_policy(module, ignored_modules=set(), root_kwargs={})


def default_store() -> dist.Store:
    """Return the store of the default process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def abort_groups() -> None:
    """Abort all process groups: end what they are doing, and leave them."""
    from torch.distributed.distributed_c10d import _abort_process_group

    _abort_process_group()


def draws_random_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of an operator draws random numbers; attention without dropout does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    arguments = operator._schema.arguments
    given = {each.name: each.default_value for each in arguments}
    given |= dict(zip(given, args, strict=False)) | {**kwargs}
    return bool(given.get("dropout_p", True))


def forget_tensors(mode: FakeTensorMode) -> None:
    """Drop the weak references a mode keeps to its tensors."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def identity(generator: torch.Generator) -> int:
    """Return an identity of a generator, whichever Python object stands for it."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


def run_unit_hooks(module: torch.nn.Module, output: Any) -> Any:
    """Run the hooks that ``fully_shard`` has set on a module, and no others; return what they make of an output."""
    for hook in filter(_is_of_units, list(module._forward_pre_hooks.values())):
        hook(module, (), {})
    for hook in filter(_is_of_units, list(module._forward_hooks.values())):
        output = hook(module, (), output)
    return output


def _is_of_units(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def in_backward() -> bool:
    """Return whether autograd is running in this thread."""
    return running_backward() is not None


def running_backward() -> int | None:
    """Return a number that the backward running in this thread shares with no other; None if none runs."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def at_backward_end(call: Callable[[], object], *, first: bool = False) -> None:
    """Have a function called at the end of a backward, if it comes to it, after what torch does there, or ``first``."""
    queue: Any = torch.autograd.Variable._execution_engine.queue_callback
    queue(call if first else lambda: queue(call))


def is_compiled(module: torch.nn.Module) -> bool:
    """Return whether torch.compile has compiled a module or anything in it."""
    return any(
        name.rpartition(".")[2] == "_orig_mod"
        or getattr(part, COMPILED_CALL) is not None
        or hasattr(part.forward, "_torchdynamo_orig_callable")
        for name, part in module.named_modules()
    )


def is_operation(value: object) -> bool:
    """Return whether something is an operation with its overload, as torch's dispatcher runs it."""
    return isinstance(value, torch._ops.OpOverload | torch._ops.HigherOrderOperator)


def is_split_over_ranks(dataset: object) -> bool:
    """Return whether a library has given an iterable dataset one rank's share of its data."""
    return bool(getattr(getattr(dataset, "_distributed", None), "world_size", 1) != 1)


def has_hooks(tensor: torch.Tensor) -> bool:
    """Return whether hooks wait for the gradients of a tensor."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def gradient_hooks(tensor: torch.Tensor) -> Mapping[int, Callable[[torch.Tensor], torch.Tensor | None]]:
    """Return the hooks that wait for the gradients of a tensor before they are added up."""
    return tensor._backward_hooks or {}


def remove_gradient_hooks(tensor: torch.Tensor) -> None:
    """Have a tensor call none of its hooks, which what has registered them still holds."""
    tensor._backward_hooks = None


def shards_and_unsharded(module: object) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter | None]]:
    """Iterate over a unit's shards, each with what the unit has computed with so far; nothing of other modules."""
    parameters = (each for group in _unit_groups(module) for each in group.fsdp_params)
    return ((each.sharded_param, getattr(each, "_unsharded_param", None)) for each in parameters)


def shard_versions(module: object) -> list[int | None]:
    """Return how often a unit's shards, and what of each is on this rank, were written to; nothing of other modules."""
    shards = (each.sharded_param for group in _unit_groups(module) for each in group.fsdp_params)
    return [version_of(tensor) for shard in shards for tensor in (shard, shard._local_tensor)]  # past autograd


def gathered_for(module: torch.nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Return which shard each tensor stands for that a unit has computed with so far; nothing of other modules."""
    return {computing: shard for shard, computing in shards_and_unsharded(module) if computing is not None}


def is_gathered(module: torch.nn.Module) -> bool:
    """Return whether a unit's parameters are gathered just now."""
    return any(group.is_unsharded for group in _unit_groups(module))


def is_coming(module: object) -> bool:
    """Return whether a unit's parameters were gathered ahead, and no call has come to them yet."""
    return any(group._all_gather_result is not None for group in _unit_groups(module))


def left_gradients(units: Iterable[object]) -> bool:
    """Return whether a unit has kept whole gradients after a backward, of whose end it was not told."""
    groups = (group for part in units for group in _unit_groups(part))
    return any(_has_whole_gradient(parameter) for group in groups for parameter in group.fsdp_params)


def deferred_shards(module: object) -> set[torch.Tensor]:
    """Return the shards for which a unit keeps gradients for a later backward that sends some; of no other modules."""
    pairs = [(group._partial_reduce_output, each) for group in _unit_groups(module) for each in group.fsdp_params]
    kept = [each for part, each in pairs if part is not None or each.unsharded_accumulated_grad is not None]
    return {each.sharded_param for each in (*kept, *(each for _, each in pairs if _has_whole_gradient(each)))}


def _has_whole_gradient(parameter: Any) -> bool:
    return getattr(getattr(parameter, "_unsharded_param", None), "grad", None) is not None


def freeze_unsharded(module: object) -> None:
    """Freeze what a unit has gathered for its backward where the shard was frozen since, as torch does at a gather."""
    for group in _unit_groups(module):
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param") and not parameter.sharded_param.requires_grad:
                parameter._unsharded_param.requires_grad_(False)


def forget_layouts() -> None:
    """Clear what torch has cached of the layouts of DTensors, whose process groups are gone."""
    if "torch.distributed.tensor" in sys.modules:
        sharding: Any = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher.sharding_propagator
        sharding.propagate_op_sharding.cache.cache_clear()
        getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


def set_local_tensor(tensor: DTensor, other: DTensor) -> None:
    """Make a DTensor consist of what another consists of."""
    tensor._local_tensor = other._local_tensor.contiguous()
    tensor._spec = other._spec


def read_shards_anew(module: torch.nn.Module) -> None:
    """Have those units of a module that are not gathered read what their shards are now."""
    for part in module.modules():
        for group in (each for each in _unit_groups(part) if each.is_sharded):
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()


def drop_deferred_gradients(module: torch.nn.Module) -> None:
    """Throw away what a unit keeps for its next backward that sends gradients; nothing of other modules."""
    for group in _unit_groups(module):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
    for unsharded in gathered_for(module):
        unsharded.grad = None


def reduce_gradients(module: object) -> None:
    """Have a unit reduce the gradients that it holds."""
    for group in _unit_groups(module):
        group.post_backward()
        group.finalize_backward()  # on CUDA, who steps waits for that


def begin_anew(module: Any) -> None:
    """Have a module's units begin anew after a backward that an exception has ended; no gradients may be left."""
    state = module._get_fsdp_state()
    if state._is_root is not None:  # else it never ran, and torch has an AttributeError for that
        getattr(module, "reset_iter_state", state._root_post_backward_final_callback)()  # the first is public


def _unit_groups(module: object) -> list[Any]:
    find: Any = getattr(module, "_get_fsdp_state", None)  # importing the class only to ask takes long
    if find is None:
        return []
    state = find()
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def version_of(tensor: torch.Tensor) -> int | None:
    """Return how often a tensor was changed in place, through itself or a view; None if that is not counted."""
    return None if tensor.is_inference() else tensor._version


@functools.cache
def written_arguments(operator: Any) -> frozenset[int | str]:
    """List the arguments an operator writes to, by position and by name."""
    schema = getattr(operator, "_schema", None)
    arguments = enumerate(() if schema is None else schema.arguments)
    written = [(k, a.name) for k, a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return frozenset(key for pair in written for key in pair)


@contextlib.contextmanager
def replaced_trunc_normal(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace torch's truncated normal by what ``replace`` makes of it."""
    with _replaced(torch.nn.init, "_no_grad_trunc_normal_", replace):
        yield


@contextlib.contextmanager
def loading_values() -> Iterator[None]:
    """Set ``torch.load`` to read values under a ``FakeTensorMode`` as well, where it would skip them."""

    def with_values(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return original(*args, **kwargs)

        return load

    with _replaced(torch, "load", with_values):
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, replace(original))
    try:
        yield
    finally:
        setattr(owner, name, original)
