"""Wrapping a module's units in upstream's XlaFullyShardedDataParallel, with collectives over the host."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shard_core import InvalidOption
from shard_core.backend import prepare_layers
from shard_core.plugins import LayerOptions, nearest
from shard_xla import collectives
from shard_xla._versions import inside_backward, register_in_place, shards_to_gather, take_over_collectives
from shard_xla.strategy.unit import unit_class

if TYPE_CHECKING:
    from shard_xla.config import XLAFSDPConfig, XLASPMDConfig

log = logging.getLogger(__name__)

#: Options that upstream's constructor takes as they are.
_KEYWORDS = (
    "reshard_after_forward",
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "disable_reshard_on_root",
    "shard_param_on_dim_0",
)

_MIB = 2**20


def shard(module: nn.Module, config: XLAFSDPConfig, *, rank: int, world_size: int) -> nn.Module:
    """Shard a module's parameters over all ranks, unit by unit; they keep their names in it.

    Args:
        module: The user's, in host memory.
        config: The options.
        rank: This rank.
        world_size: How many there are.

    Returns:
        What to call.

    Raises:
        InvalidOption: If a class that was named matches no submodule.
    """
    from torch_xla.distributed.fsdp.wrap import recursive_wrap

    check_classes(module, config)
    recompute(module, config)
    keywords = {name: getattr(config, name) for name in _KEYWORDS}
    # Upstream would take XLA's own world, and each process is a world of its own there.
    keywords |= {
        "sharding_groups": [list(range(world_size))],
        "sharding_rank": rank,
        "sharding_world_size": world_size,
    }
    wrap = functools.partial(unit_class(), **keywords)
    policy = wrap_policy(module, config)
    if policy is not None:
        recursive_wrap(
            module,
            auto_wrap_policy=policy,
            wrapper_cls=wrap,
            ignored_modules=set(),
            ignored_params=set(),
            only_wrap_children=True,
        )
    root: nn.Module = wrap(module)
    _refuse_units_inside(module, config)
    for unit in units_of(root):
        # A rank alone has nobody to talk to: through the host its step would be split into pieces for nothing.
        if world_size > 1:
            take_over_collectives(
                unit,
                all_gather=collectives.AllGather(functools.partial(shards_to_gather, unit)),
                all_reduce=collectives.all_reduce,
                reduce_scatter=collectives.ReduceScatter(config.reduce_scatter_bucket_size_mb * _MIB),
                coalesce=config.coalesce_all_gather_ops,
            )
        register_in_place(unit)
    return root


def units_of(root: nn.Module) -> Iterator[Any]:
    """List the units of a module that was sharded, the root's among them.

    Args:
        root: What ``shard`` returned.
    """
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    return (each for each in root.modules() if isinstance(each, XlaFullyShardedDataParallel))


def messages_of(root: nn.Module) -> Iterator[collectives.ReduceScatter]:
    """List what holds the gradients of each unit until they are sent; a rank alone has none.

    Args:
        root: What ``shard`` returned.
    """
    operations = (unit.reduce_scatter_op for unit in units_of(root))
    return (each for each in operations if isinstance(each, collectives.ReduceScatter))


def wrap_policy(module: nn.Module, config: XLAFSDPConfig | XLASPMDConfig) -> Callable[..., bool] | None:
    """Build upstream's policy from the options; what shares a parameter with something outside is no unit.

    Upstream would untie such a parameter without a word: each unit would shard a copy.

    Args:
        module: The whole module.
        config: The options.

    Returns:
        A policy, or None for no units but the root.
    """
    chosen = config.auto_wrap_policy
    if chosen is None:
        return None
    if isinstance(chosen, set | frozenset):
        from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy

        chosen = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=chosen)
    if "nonwrapped_numel" in inspect.signature(chosen).parameters:
        chosen = _CalledByTorchsName(chosen)
    return _Untorn(chosen, frozenset(map(id, _torn(module))))


@dataclasses.dataclass(frozen=True)
class _CalledByTorchsName:
    """A policy of torch's signature, which has another name for what upstream calls ``unwrapped_params``."""

    policy: Callable[..., bool]

    def __call__(self, module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        """Decide as the user's policy does."""
        return self.policy(module=module, recurse=recurse, nonwrapped_numel=unwrapped_params)


@dataclasses.dataclass(frozen=True)
class _Untorn:
    """A policy that leaves to the unit around it what shares a parameter with something outside."""

    policy: Callable[..., bool]
    torn: frozenset[int]

    def __call__(self, module: nn.Module, recurse: bool, unwrapped_params: int) -> bool:
        """Decide as the user's policy does, but for those."""
        wrap = self.policy(module=module, recurse=recurse, unwrapped_params=unwrapped_params)
        if wrap and not recurse and id(module) in self.torn:
            log.info("a %s shares a parameter with something outside it: no unit of its own", type(module).__name__)
            return False
        return wrap


def _torn(module: nn.Module) -> Iterator[nn.Module]:
    """List the submodules that share a parameter with something outside them."""
    holders: dict[int, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    for part in module.modules():
        inside: dict[int, int] = {}
        for each in part.modules():
            for parameter in each.parameters(recurse=False):
                inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        if any(count < holders[key] for key, count in inside.items()):
            yield part


def recompute(module: nn.Module, config: XLAFSDPConfig | XLASPMDConfig) -> None:
    """Checkpoint the activations of submodules of the classes the user named, units or not.

    Upstream's own runs a backward inside the backward for every call of a layer, and whole parameters are freed after
    the first: the gradients of a layer that is called twice cannot be computed with it.

    Args:
        module: The whole module, not wrapped yet.
        config: The options.
    """
    if config.activation_checkpointing_policy:
        classes = tuple(config.activation_checkpointing_policy)
        layers = [part for part in [*module.modules()][1:] if isinstance(part, classes)]
        for layer in layers:
            layer.forward = functools.partial(_fenced, layer.forward)
        prepare_layers(module, LayerOptions(activation_checkpointing=classes))
        for layer in layers:
            layer.forward = _method(layer, layer.forward)


def _method(layer: nn.Module, forward: Callable[..., Any]) -> types.MethodType:
    """Return a function as a method: upstream takes no unit whose forward is none."""

    def of_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        del layer
        return forward(*args, **kwargs)

    return types.MethodType(of_layer, layer)


def _fenced(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a layer; when it computes again in backward, behind a fence: the compiler would compute it only once."""
    if inside_backward():
        import torch_xla.core.xla_model as xm

        leaves, structure = pytree.tree_flatten((args, kwargs))
        leaves = [each.detach().requires_grad_(each.requires_grad) if _is_on_device(each) else each for each in leaves]
        xm.optimization_barrier_([each for each in leaves if _is_on_device(each)])
        args, kwargs = pytree.tree_unflatten(leaves, structure)
    return forward(*args, **kwargs)


def _is_on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


def check_classes(module: nn.Module, config: XLAFSDPConfig | XLASPMDConfig) -> None:
    """Refuse classes of which the model has no submodule, or none that runs.

    Args:
        module: The whole module.
        config: The options.

    Raises:
        InvalidOption: Naming the option, the class, and the nearest there is.
    """
    kinds = {type(part) for part in [*module.modules()][1:]}
    for option in ("auto_wrap_policy", "activation_checkpointing_policy"):
        chosen = getattr(config, option)
        for kind in chosen if isinstance(chosen, set | frozenset) else ():
            if not any(issubclass(each, kind) for each in kinds):
                hint = nearest(kind.__name__, {each.__name__ for each in kinds}) or "."
                raise InvalidOption(f"{option} names {kind.__name__}, of which the model has none{hint}")
            if kind.forward is nn.Module.forward:
                raise InvalidOption(
                    f"{option} names {kind.__name__}, which has no forward; name the class of what it holds."
                )


def _refuse_units_inside(module: nn.Module, config: XLAFSDPConfig) -> None:
    """Refuse what upstream computes wrong gradients of: units inside a layer that computes again in backward."""
    classes = tuple(config.activation_checkpointing_policy or ())
    for part in [*module.modules()][1:]:
        if isinstance(part, classes) and next(units_of(part), None):
            raise InvalidOption(
                f"activation_checkpointing_policy names {type(part).__name__}, which holds units, and torch_xla gets "
                "gradients wrong of units inside what is computed again; name classes that hold none, or leave what "
                "they hold out of auto_wrap_policy."
            )
