"""A small checkpoint, forged ones made of it, and the proof that a load that is refused has touched nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from bits import assert_same_bits, bits_of
from single_rank import load, save
from torch import nn

from shard_core.checkpoint.verify import Verdict, verify
from shard_core.errors import ShardError

if TYPE_CHECKING:
    from shard_core.checkpoint.interface import LoadedCheckpoint


class Trained:
    """A module and an optimizer after a step, unlike for each seed."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.module = nn.Linear(3, 2)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.normal_(generator=generator)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1 * (seed + 1))
        self.module(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Give copies of all its tensors."""
        found: dict[str, torch.Tensor] = {name: value.clone() for name, value in self.module.state_dict().items()}
        for name, parameter in self.module.named_parameters():
            slots = self.optimizer.state[parameter]
            found |= {
                f"{name}:{slot}": value.clone() for slot, value in slots.items() if isinstance(value, torch.Tensor)
            }
        return found

    def rest(self) -> list[dict[str, Any]]:
        """Give the hyper-parameters."""
        groups = self.optimizer.param_groups
        return [{key: copy.copy(value) for key, value in group.items() if key != "params"} for group in groups]


VALUES = {"step": 1, "t": torch.ones(2), "rates": [0.1, (1, None)], "names": {"a": "b", 3: float("inf")}}


def write(path: Path, seed: int = 0, form: str = "sharded") -> None:
    """Save what ``Trained(seed)`` is."""
    trained = Trained(seed)
    save(path, trained.module, trained.optimizer, VALUES, state_dict_type=form)


def loaded(path: Path) -> tuple[Trained, LoadedCheckpoint]:
    """Load into what was trained otherwise.

    Raises:
        ShardError: As the load did; what it was to fill is as it was, and the cause is a sentence, not an accident.
    """
    target = Trained(7)
    tensors, rest = target.tensors(), target.rest()
    try:
        return target, load(path, target.module, target.optimizer)
    except ShardError as error:
        refused = error
    assert isinstance(refused.__cause__, ShardError), f"raw {type(refused.__cause__).__name__}: {refused}"
    assert_same_bits(target.tensors(), tensors)
    assert target.rest() == rest
    raise refused


def refusal(path: Path) -> ShardError | None:
    """Load, and tell why it was refused; None if it was not, and then all tensors are those that were saved."""
    try:
        target, found = loaded(path)
    except ShardError as error:
        return error
    assert_same_bits(target.tensors(), Trained(0).tensors())
    assert torch.equal(bits_of(found.values["t"]), bits_of(VALUES["t"]))
    return None


def judged(path: Path) -> Verdict | None:
    """Verify; None if there is nothing to be verified."""
    try:
        return verify(path)
    except ShardError:
        return None


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it the digest that belongs to the change."""
    content = json.loads((path / "manifest.json").read_text())
    del content["digest"]
    change(content)
    seal(path, json.dumps(content)[:-1].encode())


def seal(path: Path, body: bytes) -> None:
    """Write a manifest of any text but its last brace, and the digest that belongs to it."""
    (path / "manifest.json").write_bytes(body + b', "digest": "%s"}\n' % xxhash.xxh3_128_hexdigest(body).encode())
