"""Calling a collective on every leaf of a nested structure, the same leaf on every rank."""

from __future__ import annotations

import contextlib
import hashlib
import json
import numbers
from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import CollectiveError
from shard_core.structures import is_nested, map_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shard_core.collectives.interface import Collectives

#: Stands where several leaves would have one path.
_SAME_PATH = object()


class Leaves:
    """Calls a collective on a tensor, a number, or each leaf of a structure of them.

    A structure costs one small message more: ranks compare theirs before any leaf is sent. Its keys may stand in
    another order on another rank.

    Args:
        verb: What the user has called, for messages.
        collectives: Of all ranks.
        group: Those that take part; None for the whole world.
        device: Where numbers are put.
    """

    def __init__(self, verb: str, collectives: Collectives, group: Any, device: torch.device) -> None:
        self._verb = verb
        self._collectives = collectives
        self._group = group
        self._device = device

    def map(
        self,
        data: Any,
        call: Callable[[torch.Tensor], torch.Tensor],
        check: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> Any:
        """Return what a collective makes of every leaf, in the structure of what was given.

        Args:
            data: A tensor, a number, or a structure.
            call: The collective.
            check: Raises a ``CollectiveError`` for a tensor that it must not be called on.

        Returns:
            A tensor, or a structure of tensors.

        Raises:
            CollectiveError: If a leaf cannot be sent, or ranks have different structures; on every rank.
        """
        if not is_nested(data):
            tensor = self._tensor("", data)
            check(tensor)
            return call(tensor)
        leaves = self._leaves(data)
        self._check_alike({path: _described(leaves[path]) for path in sorted(leaves)})
        tensors = {path: self._tensor(path, leaves[path]) for path in sorted(leaves)}
        for path, tensor in tensors.items():
            try:
                check(tensor)
            except CollectiveError as error:
                raise CollectiveError(f"at {path}, {error}") from None
        results = {path: call(tensor) for path, tensor in tensors.items()}
        return map_leaves(data, lambda path, _: results[path])

    def _leaves(self, data: Any) -> dict[str, Any]:
        leaves: dict[str, Any] = {}

        def note(path: str, leaf: Any) -> None:
            leaves[path] = _SAME_PATH if path in leaves else leaf

        map_leaves(data, note)
        return leaves

    def _tensor(self, path: str, leaf: Any) -> torch.Tensor:
        tensor = _as_tensor(leaf, self._device)
        if tensor is not None:
            return tensor
        if leaf is _SAME_PATH:
            raise CollectiveError(
                f"{self._verb} was given two keys that are both written {path}, which cannot be told apart on "
                "other ranks; take strings for keys."
            )
        raise CollectiveError(
            f"{self._verb} takes tensors and numbers, and dicts, lists, tuples and dataclasses of them, not "
            f"{_described(leaf)}{f' at {path}' if path else ''}; leave it out, or use broadcast for other objects."
        )

    def _check_alike(self, leaves: Mapping[str, str]) -> None:
        """Compare digests of what the ranks have, and all of it only if they differ."""
        text = json.dumps(leaves).encode()
        digests = self._gathered(hashlib.sha256(text).digest())
        if (digests == digests[0]).all():
            return
        lengths = self._collectives.all_gather(torch.tensor(len(text)), self._group).tolist()
        rows = self._gathered(text.ljust(max(lengths)))
        first, *others = (json.loads(bytes(row.tolist())) for row in rows)
        rank, other = next((rank, other) for rank, other in enumerate(others, start=1) if other != first)
        path = next(path for path in sorted({*first, *other}) if first.get(path) != other.get(path))
        of = "rank" if self._group is None else "the group's rank"
        raise CollectiveError(
            f"ranks gave different structures to {self._verb}: {of} {rank} has {other.get(path, 'nothing')} at {path}, "
            f"where rank 0 has {first.get(path, 'nothing')}; every rank must give the same keys, shapes and dtypes."
        )

    def _gathered(self, content: bytes) -> torch.Tensor:
        mine = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return self._collectives.all_gather(mine, self._group).cpu()


def _described(leaf: Any) -> str:
    """Return what must be alike of a leaf on all ranks; nothing raises here, while others wait for the answer."""
    if leaf is _SAME_PATH:
        return "two keys written alike"
    tensor = _as_tensor(leaf)
    if tensor is not None:
        return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    return f"{type(leaf).__name__}{' that torch has no dtype for' if isinstance(leaf, numbers.Number) else ''}"


def _as_tensor(leaf: Any, device: torch.device | None = None) -> torch.Tensor | None:
    """Return a tensor, or a number as one; None for anything else, such as fractions and integers beyond 64 bits."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    if isinstance(leaf, numbers.Number):
        with contextlib.suppress(ArithmeticError, RuntimeError, TypeError, ValueError):
            return torch.tensor(leaf, device=device)
    return None
