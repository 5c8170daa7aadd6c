"""Refusing quantised weights, which are recognised by the libraries they come from; none of these is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shard_core.errors import SetupError
from shard_core.parameters import plain_module_name, plain_name

if TYPE_CHECKING:
    from torch import nn

#: The packages whose tensors and layers hold numbers in other shapes and dtypes than the weights they stand for.
_LIBRARIES = frozenset(
    {"aqlm", "auto_gptq", "awq", "bitsandbytes", "compressed_tensors", "gptqmodel", "hqq", "optimum", "torchao"}
)


def refuse_quantized(module: nn.Module) -> None:
    """Refuse a module that has quantised weights: setup would cast them without their scales, or shard them.

    Args:
        module: The user's.

    Raises:
        SetupError: Naming the first of them, and what it is.
    """
    found = quantized_part(module)
    if found is not None:
        name, kind = found
        raise SetupError(
            f"{name!r} is {kind}, and no strategy keeps quantised weights what they are: setup casts and lays out "
            "tensors without their scales; load the model without quantization."
        )


def quantized_part(module: nn.Module) -> tuple[str, str] | None:
    """Find the first quantised weight of a module.

    Args:
        module: Any module.

    Returns:
        The name of the weight, or of the layer, and what it is; None if there is none.

    Example:
        >>> from torch import nn
        >>> print(quantized_part(nn.Linear(2, 2)))
        None
    """
    for name, part in module.named_modules():
        tensors = dict((*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)))
        for key, tensor in tensors.items():
            if _library(tensor) in _LIBRARIES:
                return plain_name(f"{name}.{key}" if name else key), _kind(tensor)
        # Layers of some libraries pack weights into plain tensors of integers; others train plain weights.
        if _library(part) in _LIBRARIES and not all(tensor.is_floating_point() for tensor in tensors.values()):
            return plain_module_name(name) or "the module", _kind(part)
        method = vars(part).get("quantization_method")
        if method is not None:
            return plain_module_name(name) or "the module", f"quantised by {getattr(method, 'value', method)}"
    return None


def _library(thing: object) -> str:
    return type(thing).__module__.partition(".")[0]


def _kind(thing: object) -> str:
    return f"{type(thing).__name__} of {_library(thing)}"
