"""The user's batch: what it may be, how it is split, and how a model makes a loss of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shard_core.errors import InvalidOption

_PLAIN = (str, int, float, bool, type(None))


def plain_batch(batch: Any) -> Any:
    """Convert a batch to tensors in dicts, tuples and lists, and check that its tensors begin with the samples.

    Args:
        batch: A tensor, a tuple of arguments, or a mapping of keyword arguments.

    Returns:
        The batch.

    Raises:
        InvalidOption: If it holds anything else, no samples, or different numbers of them.

    Example:
        >>> plain_batch((torch.ones(4, 2), torch.ones(3)))
        Traceback (most recent call last):
        ...
        shard_core.errors.InvalidOption: batch[0] has 4 samples and batch[1] has 3; the first dimension of \
every tensor in the batch must be the samples (a tensor without dimensions goes to every rank whole).
    """
    made = _plain(batch, "batch")
    if not isinstance(made, torch.Tensor | tuple | list | dict):
        raise InvalidOption(
            f"the batch is of type {type(batch).__name__}; give a tensor, a tuple or a dict of tensors."
        )
    sizes = {place: len(tensor) for place, tensor in _tensors(made, "batch") if tensor.ndim}
    if not sizes:
        raise InvalidOption("the batch holds no tensor with a dimension of samples; there is nothing to split.")
    first = next(iter(sizes))
    for place, size in sizes.items():
        if size != sizes[first]:
            raise InvalidOption(
                f"{first} has {sizes[first]} samples and {place} has {size}; the first dimension of every tensor in "
                "the batch must be the samples (a tensor without dimensions goes to every rank whole)."
            )
    return made


def samples_in(batch: Any) -> int:
    """Count the samples of a batch that ``plain_batch`` returned."""
    return next(len(tensor) for _, tensor in _tensors(batch, "batch") if tensor.ndim)


def part_of(batch: Any, part: int, parts: int) -> Any:
    """Slice one of several equal parts out of a batch.

    Args:
        batch: What ``plain_batch`` returned.
        part: Which.
        parts: Of how many; divides the number of samples.

    Returns:
        A batch of the same structure.

    Example:
        >>> part_of({"x": torch.arange(4), "scale": 2.0}, 1, 2)
        {'x': tensor([2, 3]), 'scale': 2.0}
    """
    return _mapped(batch, lambda tensor: tensor.chunk(parts)[part] if tensor.ndim else tensor)


def reversed_samples(batch: Any) -> Any:
    """Reverse the order of a batch's samples."""
    return _mapped(batch, lambda tensor: tensor.flip(0) if tensor.ndim else tensor)


def to_device(batch: Any, device: torch.device) -> Any:
    """Move a batch."""
    return _mapped(batch, lambda tensor: tensor.to(device))


def loss_of(call: Callable[..., Any], batch: Any, own_loss: Callable[[Any, Any], Any] | None = None) -> torch.Tensor:
    """Call a model on a batch and find the loss in what it returns.

    Args:
        call: The model.
        batch: A tensor is its argument, a tuple or list its arguments, a dict its keyword arguments.
        own_loss: Makes the loss from output and batch; None expects it in the output.

    Returns:
        A scalar.

    Raises:
        InvalidOption: If there is no loss in the output.

    Example:
        >>> loss_of(lambda x, y: (x - y).square().mean(), (torch.ones(2), torch.zeros(2)))
        tensor(1.)
    """
    if isinstance(batch, dict):
        output = call(**batch)
    else:
        output = call(*batch) if isinstance(batch, tuple | list) else call(batch)
    if own_loss is not None:
        found = own_loss(output, batch)
    elif isinstance(output, Mapping):
        found = output.get("loss")
    else:
        found = output if isinstance(output, torch.Tensor) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found.reshape(())
    what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
    where = "--loss returned" if own_loss else f"the model returned {type(output).__name__}, whose loss would be"
    raise InvalidOption(
        f"{where} {what}, not a scalar tensor; let the model return its loss (alone, or as `.loss` of its output), "
        "or give --loss script.py:function with function(output, batch)."
    )


def _plain(value: Any, place: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _plain(each, f"{place}[{key!r}]") for key, each in value.items()}
    if isinstance(value, tuple | list):
        made = [_plain(each, f"{place}[{number}]") for number, each in enumerate(value)]
        return made if isinstance(value, list) else tuple(made)
    if isinstance(value, _PLAIN):
        return value
    raise InvalidOption(
        f"{place} is of type {type(value).__module__}.{type(value).__qualname__}; a batch holds tensors, numbers and "
        "texts, in dicts, tuples and lists (torch.from_numpy makes a tensor of an array)."
    )


def _tensors(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _tensors(each, f"{place}[{key!r}]")
    elif isinstance(value, tuple | list):
        for number, each in enumerate(value):
            yield from _tensors(each, f"{place}[{number}]")


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, change) for each in value)
    return value
