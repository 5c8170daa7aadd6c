"""What the values of options may be, checked without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from shard_core.errors import InvalidOption, nearest
from shard_core.plugins.signatures import check_signature

_PREFETCHES = ("backward_pre", "backward_post", "none")
_ASKED = {"module": None, "recurse": True, "nonwrapped_numel": 0}


def policy(name: str, value: Any) -> None:
    """Check what chooses units: classes, a function, or one of torch's policies.

    Args:
        name: The option.
        value: What the user gave.

    Raises:
        InvalidOption: If it is none of these, or the function takes other arguments.
    """
    # Torch's CustomPolicy cannot be called; asking for its class would import torch.
    is_policy = not isinstance(value, type) and (callable(value) or type(value).__name__ == "CustomPolicy")
    if value is not None and not is_policy and not _are_classes(name, value):
        raise InvalidOption(
            f"{name} is {value!r:.60}; give a set of classes, a policy of torch.distributed.fsdp.wrap, or a function "
            "of module, recurse and nonwrapped_numel."
        )
    if callable(value):
        check_signature(name, value, "policy(module, recurse, nonwrapped_numel)", **_ASKED)


def layers(name: str, value: Any) -> None:
    """Check what chooses layers: a class, classes, or a function of a module.

    Args:
        name: The option.
        value: What the user gave.

    Raises:
        InvalidOption: If it is none of these, or the function takes other arguments.
    """
    if value is not None and not callable(value) and not _are_classes(name, value):
        raise InvalidOption(
            f"{name} is {value!r:.60}; give a class of modules, a list of classes, or a function of a module."
        )
    if callable(value) and not isinstance(value, type):
        check_signature(name, value, "function(module)", None)


def checkpointing(name: str, value: Any) -> Any:
    """Check what chooses layers and, in a dict, which of their operations keep their results.

    Args:
        name: The option.
        value: What the user gave.

    Returns:
        The same, operations replaced by their names: torch's do not travel between processes.

    Raises:
        InvalidOption: If it is neither, or the policy is neither operations nor a function of torch's signature.
    """
    if not isinstance(value, Mapping):
        layers(name, value)
        return value
    for key in value:
        if key not in ("layers", "policy"):
            raise InvalidOption(
                f"{name} has no {key!r}{nearest(str(key), ('layers', 'policy')) or '.'} A dict of it has 'layers', and "
                "'policy', which says what of them is kept."
            )
    if value.get("layers") is None:
        raise InvalidOption(f"{name} is a dict without 'layers'; say which: a class, a list of classes, or a function.")
    layers(name, value["layers"])
    policy = value.get("policy")
    if callable(policy):
        check_signature(f"{name}'s policy", policy, "policy(context, operation, *args, **kwargs)", None, None, None)
    elif policy is not None and (not isinstance(policy, Collection) or isinstance(policy, str) or not policy):
        raise InvalidOption(
            f"{name} has the policy {policy!r:.60}; give a list of operations to keep, such as "
            "[torch.ops.aten.mm.default] or ['aten.mm'], or a function of context, operation and its arguments."
        )
    else:
        return {**value, "policy": None if policy is None else tuple(str(operation) for operation in policy)}
    return value


def collection(name: str, value: Any) -> None:
    """Check what lists parts of a model.

    Args:
        name: The option.
        value: What the user gave.

    Raises:
        InvalidOption: If it is no collection.
    """
    if not isinstance(value, Collection) or isinstance(value, str | Mapping):
        raise InvalidOption(f"{name} is {value!r:.60}; give a list, such as ['blocks.*.norm'].")


def backward_prefetch(value: Any) -> str | int | None:
    """Normalize the order of gathering in backward.

    Args:
        value: What the user gave: torch's enum, its names in any case, None, or a number of units.

    Returns:
        ``"backward_pre"``, ``"backward_post"``, None, or how many units are gathered ahead.

    Raises:
        InvalidOption: If there is no such order.

    Example:
        >>> backward_prefetch("BACKWARD_PRE")
        'backward_pre'
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    name = value if isinstance(value, str) else getattr(value, "name", "none" if value is None else "")
    if str(name).lower() not in _PREFETCHES:
        raise InvalidOption(
            f"backward_prefetch is {value!r}{nearest(str(name), _PREFETCHES) or ';'} give 'backward_pre', "
            "'backward_post', None, torch's BackwardPrefetch, or a number of units from 1 up."
        )
    return None if name.lower() == "none" else name.lower()


def offload(value: Any) -> Any:
    """Normalize where shards live between uses.

    Args:
        value: What the user gave.

    Returns:
        None, whether to offload, or torch's policy for it.

    Raises:
        InvalidOption: If it is none of torch's own objects.
    """
    if value is None or isinstance(value, bool):
        return value
    # Who gives an object of torch's has imported it.
    from shard_core.fully_shard.offload import checked_offload

    return checked_offload(value)


def mixed_precision(value: Any) -> None:
    """Check the dtypes in which shards travel.

    Args:
        value: What the user gave.

    Raises:
        InvalidOption: If it has the wrong type, or asks for what ``fully_shard`` does not do.
    """
    if value is not None:
        from shard_core.fully_shard.precision import check_mixed_precision

        check_mixed_precision(value)


def _are_classes(name: str, value: Any) -> bool:
    if not isinstance(value, Collection) or isinstance(value, str) or not value:
        return False
    for kind in value:
        if not isinstance(kind, type):
            raise InvalidOption(
                f"{name} names {kind!r:.60}; name classes of modules, such as nn.TransformerEncoderLayer."
            )
    return True
