"""What every test of recording and replaying needs: one build with values, one without."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shard_core.initialization.recording import Recording, record


@dataclasses.dataclass(kw_only=True)
class Builds:
    """A plain build and a recorded one from the same seed, and the next number of each generator."""

    plain: dict[str, torch.Tensor]
    delivered: dict[str, torch.Tensor]
    deliveries: list[str]
    plain_next: torch.Tensor
    recorded_next: torch.Tensor
    recording: Recording

    @property
    def wrong(self) -> list[str]:
        """Names of tensors that are not bit for bit those of the plain build."""
        return [name for name, value in self.plain.items() if not same(value, self.delivered.get(name))]

    def check(self) -> None:
        """Compare everything."""
        assert sorted(self.deliveries) == sorted(self.plain)
        assert self.wrong == []
        assert same(self.plain_next, self.recorded_next)


def same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Compare bits, so that NaN equals itself and minus zero is not zero."""
    if other is None or one.dtype is not other.dtype or one.shape != other.shape:
        return False
    bits = [t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*bits)


def named_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


Make = Callable[[], nn.Module]
Then = Callable[[nn.Module], dict[str, torch.Tensor] | None]


@pytest.fixture
def built() -> Callable[..., Builds]:
    """Build a module twice; ``then`` is what happens to it between the constructor and setup."""

    def build(make: Make, then: Then = lambda _: None, seed: int = 7) -> Builds:
        torch.manual_seed(seed)
        module = make()
        plain = {**(then(module) or {}), **named_tensors(module)}
        plain_next = torch.rand(3)

        torch.manual_seed(seed)
        with record() as recording:
            module = make()
        wanted = {**(then(module) or {}), **named_tensors(module)}
        delivered: dict[str, torch.Tensor] = {}
        deliveries: list[str] = []

        def deliver(name: str, value: torch.Tensor) -> None:
            deliveries.append(name)
            delivered[name] = value.clone()

        recording.replay(wanted, deliver)
        return Builds(
            plain=plain,
            delivered=delivered,
            deliveries=deliveries,
            plain_next=plain_next,
            recorded_next=torch.rand(3),
            recording=recording,
        )

    return build
