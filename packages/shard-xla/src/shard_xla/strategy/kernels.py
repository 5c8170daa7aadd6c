"""Operations of which XLA has a wrong kernel, or none for the backward, computed from others."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@functools.cache
def correct_kernels() -> torch.library.Library:
    """Compute some operations on XLA's devices otherwise than torch_xla does, in this process from now on.

    In torch_xla 2.9.0, the gradients of ``elu`` and ``celu`` are computed as if the input were the output, and those in
    bfloat16 fail, in place too; ``selu`` has no gradient of its own, ``norm`` of an infinite order is 1, ``amax`` and
    ``amin`` over no dims, which are all to torch, return what they got, and the backward of ``batch_norm`` by fixed
    statistics raises, since it asks for those of the batch.

    Returns:
        What they are registered through, for as long as it is held.
    """
    library = torch.library.Library("aten", "IMPL")
    norms = {"Scalar": _norm, "ScalarOpt_dim": _norm, "ScalarOpt_dtype": _norm_as, "ScalarOpt_dim_dtype": _norm_as}
    units = {"elu": _elu, "celu": _celu, "selu": _selu}
    kernels: dict[str, Any] = {"batch_norm": _batch_norm, **units}
    kernels |= {f"{name}_": functools.partial(_in_place, kernel) for name, kernel in units.items()}
    kernels |= {f"norm.{overload}": kernel for overload, kernel in norms.items()}
    for name, kernel in kernels.items():
        library.impl(name, kernel, "AutogradXLA")
    for name in ("amax", "amin"):
        upstreams = torch.library.get_kernel(f"aten::{name}", "AutogradXLA")
        library.impl(name, functools.partial(_over_all_dims, upstreams), "AutogradXLA", with_keyset=True)
    return library


def _elu(values: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    # What is positive stays out of the exponential: infinite, it would have no gradient, chosen or not.
    negative = torch.expm1(values.clamp(max=0) * input_scale) * (alpha * scale)
    return torch.where(values > 0, values * scale, negative)


def _celu(values: Tensor, alpha: float = 1.0) -> Tensor:
    return _elu(values, alpha, 1.0, 1.0 / alpha)


def _selu(values: Tensor) -> Tensor:
    return _elu(values, _SELU_ALPHA, _SELU_SCALE)


def _in_place(kernel: Any, values: Tensor, *args: Any, **keywords: Any) -> Tensor:
    return values.copy_(kernel(values.clone(), *args, **keywords))


def _norm(values: Tensor, p: float | None = 2.0, dim: Any = None, keepdim: bool = False) -> Tensor:
    order = 2.0 if p is None else p
    found: Tensor = torch.linalg.vector_norm(values, order, dim or None, keepdim)
    return found


def _norm_as(values: Tensor, p: float | None, *rest: Any, dtype: torch.dtype) -> Tensor:
    return _norm(values.to(dtype), p, *rest)


def _over_all_dims(upstreams: Any, keys: Any, values: Tensor, dim: Any = (), *rest: Any, **keywords: Any) -> Tensor:
    dims = list(range(values.dim())) if dim is None or not len(dim) else dim
    found: Tensor = upstreams.call_boxed(keys, values, dims, *rest, **keywords)
    return found


def _batch_norm(
    values: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, variance: Tensor | None, *rest: Any
) -> Tensor:
    training, momentum, eps, _ = rest
    if training or mean is None or variance is None:
        normalized: Tensor = torch.native_batch_norm(values, weight, bias, mean, variance, training, momentum, eps)[0]
        return normalized
    channels = (-1, *[1] * (values.dim() - 2))
    found = (values - mean.view(channels)) * (variance + eps).rsqrt().view(channels)
    if weight is not None:
        found = found * weight.view(channels)
    if bias is not None:
        found = found + bias.view(channels)
    typed: Tensor = found.to(values.dtype)
    return typed
