"""Parameters by their names, so that optimizers follow them through sharding."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shard_core._versions import has_hooks
from shard_core.errors import SetupError
from shard_core.structures import follow_references

#: Module attributes under which wrappers keep what they wrap; they never appear in a name. The first two are those of
#: compiling and activation checkpointing, the others those of units under torch_xla.
WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_fpw_module", "_orig_module"})

#: What torch's optimizers count beside a parameter, each in a tensor without dimensions. By its shape alone it could be
#: state of a parameter that has no dimensions either, which one rank holds.
COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})

#: Those of them that ASGD multiplies elements by, on the parameter's device.
FACTORS = frozenset({"eta", "mu"})


def plain_name(name: str) -> str:
    """Remove what compiling, activation checkpointing and wrapped units put into a tensor's name.

    Args:
        name: A name from ``named_parameters`` or ``named_buffers``.

    Returns:
        The name the user's own module has for it.

    Example:
        >>> plain_name("blocks.0._orig_mod.attention.weight")
        'blocks.0.attention.weight'
    """
    *owners, own = name.split(".")
    return ".".join([*(owner for owner in owners if owner not in WRAPPED), own])


def plain_module_name(name: str) -> str:
    """Remove what compiling, activation checkpointing and wrapped units put into a module's name.

    Args:
        name: A name from ``named_modules``.

    Returns:
        The name the user's own module has for it; that of a wrapper and of what it wraps is the same.

    Example:
        >>> plain_module_name("blocks.0._orig_mod")
        'blocks.0'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPED)


class ParameterNames:
    """The names a module's parameters had at one moment, tied ones under several names.

    The parameters are kept alive until ``let_go``: what a sharded module had before is all of it, on every rank.

    Args:
        module: Any module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, list[str]] = {}
        self._held: list[nn.Parameter] = []
        self._references: dict[int, weakref.ref[nn.Parameter]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if parameter not in self:
                self._held.append(parameter)
                self._references[id(parameter)] = weakref.ref(parameter)
            self._names.setdefault(id(parameter), []).append(plain_name(name))

    def __contains__(self, parameter: object) -> bool:
        """Return whether the module had this very parameter."""
        known = self._references.get(id(parameter))
        return known is not None and known() is parameter  # an identity may be another's once the first is gone

    def of(self, parameter: torch.Tensor) -> str:
        """Return the first name of a parameter the module had.

        Raises:
            KeyError: If it did not have it.
        """
        if parameter not in self:
            raise KeyError(f"no parameter of the module has shape {tuple(parameter.shape)} and this identity")
        return self._names[id(parameter)][0]

    def find(self, parameter: torch.Tensor) -> str | None:
        """Return the first name of a parameter; None if the module did not have it."""
        return self.of(parameter) if parameter in self else None

    @property
    def ties(self) -> list[list[str]]:
        """The names of each parameter that has several."""
        return [names for names in self._names.values() if len(names) > 1]

    def parameters(self) -> Iterable[nn.Parameter]:
        """Iterate over the parameters, each once."""
        return iter(self._held)

    def let_go(self) -> None:
        """Keep no parameter alive any more; those that others keep, such as an optimizer of before, are still known."""
        self._held.clear()

    def repoint(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        module: nn.Module | Mapping[str, torch.Tensor],
        lay_out: Callable[[torch.Tensor, str, Any], Any] | None = None,
    ) -> None:
        """Point optimizers at the parameters a module has now instead of those it had.

        Groups, hyper-parameters and learning-rate schedulers stay what they are: the lists in the
        groups are changed in place, as are lists, dicts and sets of parameters that an optimizer keeps beside them.
        State that exists already is laid out like the new parameters.

        Args:
            optimizers: Optimizers made over the parameters the module had, or over those it has.
            module: The same module, with new parameters under the old names; or those parameters by these
                names, where wrappers in the module hide them.
            lay_out: Lays optimizer state out like its new parameter, given that, the slot's name and the value; None
                for ``laid_out_like``.

        Raises:
            SetupError: If an optimizer holds a parameter the module did not have.
        """
        now: Mapping[str, torch.Tensor] = (
            {plain_name(name): p for name, p in module.named_parameters(remove_duplicate=False)}
            if isinstance(module, nn.Module)
            else module
        )
        lay_out = lay_out or (lambda parameter, slot, value: laid_out_like(parameter, value))  # noqa: ARG005
        current = {id(parameter): parameter for parameter in now.values()}
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                replaced = [
                    (old, current[id(old)] if id(old) in current else now[self._known(old)]) for old in group["params"]
                ]
                group["params"][:] = [new for _, new in replaced]
                follow_references(optimizer, dict(replaced), lambda new, kept: lay_out(new, "", kept))
                for old, new in replaced:
                    if old in optimizer.state:
                        optimizer.state[new] = {
                            slot: lay_out(new, slot, value) for slot, value in optimizer.state.pop(old).items()
                        }

    def _known(self, parameter: torch.Tensor) -> str:
        if parameter in self:
            return self.of(parameter)
        raise SetupError(
            f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that the module does not have; "
            "set up the module it belongs to, or make the optimizer from this module's parameters()."
        )


def make_contiguous(module: torch.nn.Module) -> None:
    """Lay parameters out row by row, as engines cut them; transposed ones and ``channels_last`` are laid out otherwise.

    Args:
        module: The user's; values and names stay as they are.
    """
    for parameter in module.parameters():
        if not parameter.is_contiguous():
            parameter.data = parameter.data.contiguous()


def make_strides_usual(module: torch.nn.Module) -> None:
    """Set the strides of parameters that are laid out row by row to those of new tensors; no value is moved.

    A dim of one element may have any stride, as in ``weight.t().clone()``, which engines take for another layout.

    Args:
        module: The user's.

    Example:
        >>> module = nn.ParameterList([torch.ones(1, 3).t().clone()])
        >>> make_strides_usual(module)
        >>> module[0].stride()
        (1, 1)
    """
    for parameter in module.parameters():
        usual = torch.empty(parameter.shape, device="meta").stride()
        if parameter.is_contiguous() and parameter.stride() != usual:
            parameter.data = parameter.data.as_strided(parameter.shape, usual)


def laid_out_like(parameter: torch.Tensor, value: Any) -> Any:
    """Return a value of optimizer state on the device, in the dtype and shards of its parameter.

    Args:
        parameter: A plain tensor or a DTensor.
        value: A tensor of the parameter's whole shape, the same on every rank; anything else, such as
            a step count, is returned as it is.

    Returns:
        The value in the parameter's layout.
    """
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape != parameter.shape:
        return value
    dtype = parameter.dtype if value.is_floating_point() else value.dtype
    return sharded_like(parameter, value.to(parameter.device, dtype))


def sharded_like(parameter: torch.Tensor, value: Any) -> Any:
    """Shard a plain tensor of a DTensor's whole shape as that is.

    Args:
        parameter: A plain tensor, as which everything stays what it is, or a DTensor.
        value: A tensor of the parameter's whole shape, the same on every rank; anything else is returned as it is.

    Returns:
        A DTensor of the same dtype, on the parameter's device.
    """
    if not isinstance(parameter, DTensor) or not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
        return value
    if value.dim() == 0 or value.shape != parameter.shape:
        return value
    rows = value.contiguous()  # as ``make_contiguous`` lays parameters out; a DTensor cannot show shards of others
    shards = distribute_tensor(rows, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return shards.to(parameter.device)  # those of an offloaded parameter are not where its mesh is


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what of a tensor lives on this rank, sharing its memory.

    Args:
        tensor: A plain tensor or a DTensor.

    Returns:
        A plain tensor without a gradient of its own.
    """
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@contextlib.contextmanager
def alone_trained(chosen: Container[torch.Tensor], parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Have only some parameters trained within, where an engine takes those that are just then.

    Args:
        chosen: These.
        parameters: All that can have a gradient.
    """
    before = {parameter: parameter.requires_grad for parameter in parameters}
    try:
        for parameter in before:
            parameter.requires_grad_(parameter in chosen)
        yield
    finally:
        for parameter, trained in before.items():
            parameter.requires_grad_(trained)


def check_no_gradients(names: ParameterNames) -> None:
    """Check that parameters carry no gradients, which setup would lose.

    Args:
        names: The parameters about to be sharded.

    Raises:
        SetupError: Naming the first parameter with a gradient.
    """
    for parameter in names.parameters():
        if parameter.grad is not None:
            raise SetupError(
                f"parameter {names.of(parameter)!r} has a gradient already, which setup would lose; "
                "call zero_grad() first, or set up before the first backward."
            )


def check_hooks_kept(names: ParameterNames, module: nn.Module) -> None:
    """Check that a module still has the parameters on whose gradients hooks were registered.

    Args:
        names: The parameters the module had before setup.
        module: The module now.

    Raises:
        SetupError: Naming the first parameter whose hooks nothing will call.
    """
    now = {id(parameter) for parameter in module.parameters()}
    for parameter in names.parameters():
        if id(parameter) not in now and has_hooks(parameter):
            raise SetupError(
                f"parameter {names.of(parameter)!r} has a hook on its gradient that nothing would call: this strategy "
                "gives the module other parameters; remove the hook, and change gradients between backward and step."
            )
