"""Checking that every rank recorded the same program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import xxhash

from shard_core.errors import CannotReplay
from shard_core.initialization.tape import Operation, Value, View, transformed

if TYPE_CHECKING:
    from shard_core.coordinator import Coordinator


def check_agreement(
    operations: Sequence[Operation], constants: Mapping[str, torch.Tensor], coordinator: Coordinator
) -> None:
    """Compare this rank's program with that of the others; every rank calls this.

    Args:
        operations: What made the values that are about to be replayed.
        constants: Tensors that had values from the start, by name.
        coordinator: Of all ranks.

    Raises:
        CannotReplay: On every rank, when the programs differ.
    """
    lines = [*_lines(operations), *(f"{name}: {_content(tensor)}" for name, tensor in constants.items())]
    if len(set(coordinator.gather_objects(xxhash.xxh3_64_hexdigest("\n".join(lines).encode())))) == 1:
        return
    programs = coordinator.gather_objects(lines)
    longest = max(map(len, programs))
    steps = [[program[k] if k < len(program) else "nothing" for program in programs] for k in range(longest)]
    step = next(step for step in steps if len(set(step)) > 1)
    rank = next(rank for rank, line in enumerate(step) if line != step[0])
    raise CannotReplay(
        f"ranks built different modules: where rank 0 did {step[0]}, rank {rank} did {step[rank]}; a constructor must"
        " do the same on every rank, so seed Python's and numpy's random numbers alike and ask for no rank or time"
    )


def _lines(operations: Sequence[Operation]) -> list[str]:
    numbers: dict[Value | None, int] = {}

    def described(leaf: Any) -> str:
        if isinstance(leaf, View):
            number = numbers.setdefault(leaf.value, len(numbers))
            return f"tensor {number} {leaf.size} {leaf.stride} {leaf.offset} {leaf.dtype}"
        if isinstance(leaf, torch.Tensor):
            return _content(leaf)
        return "a generator" if isinstance(leaf, torch.Generator) else repr(leaf)

    return [_line(operation, described) for operation in operations]


def _line(operation: Operation, described: Any) -> str:
    name = operation.function if hasattr(operation.function, "overloadpacket") else operation.function.__name__
    start = ""
    if operation.before is not None and operation.before.producer is None:
        assert operation.before.state is not None
        start = f" from generator state {_content(operation.before.state)}"
    arguments = transformed((operation.args, operation.kwargs, operation.outputs), described)
    return f"{name} on {arguments}{start}"


def _content(tensor: torch.Tensor) -> str:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    digest = xxhash.xxh3_64_hexdigest(flat.view(torch.uint8).numpy().data)
    return f"values {digest} {tuple(tensor.shape)} {tensor.dtype}"
