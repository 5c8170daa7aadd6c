"""A loss through modules that were set up apart: what it needs, it needs in each, however their units are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shard_core import get_strategy
from shard_core.testing import oracle


class Layers(nn.Module):
    """Has a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


#: By what precision a loss is computed, how, whether with a denominator, and how exactly.
LOSSES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], bool, float]] = {
    "denominator": ("32-true", lambda output: output.square().sum(), True, 1e-5),
    "scaler": ("16-mixed", lambda output: output.float().square().mean() * 1e-3, False, 5e-3),
}


def make() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return Layers(), Layers()


def batch(rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank, 24).view(4, 6)[: 4 - rank]


def through_two(name: str, options: dict[str, Any], loss: str, method: str) -> list[Any]:
    """Go backward through two modules, the first of which is not named; return the gradients and norm of each."""
    precision, reduce, divided, _ = LOSSES[loss]
    with get_strategy(name, precision=precision, **options) as strategy:
        ready = []
        for module in make():
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            ready.append((strategy.setup_module_and_optimizers(module, [optimizer])[0], optimizer))
        (first, _), (second, _) = ready
        inputs = batch(strategy.global_rank)
        for micro in range(2):
            with strategy.no_backward_sync(first, micro == 0), strategy.no_backward_sync(second, micro == 0):
                outputs = second(getattr(first, method)(inputs))
                strategy.backward(reduce(outputs), second, denominator=inputs.numel() if divided else None)
        gradients = [strategy.module_gradients(module) for module, _ in ready]
        norms = [strategy.clip_gradients_norm(*each, 1e9).item() for each in ready]
        return list(zip(gradients, norms, strict=True))


RUNS = [
    ("fsdp", {"unit_bytes": 1}, "denominator", "forward"),
    ("fsdp", {"unit_bytes": 1}, "denominator", "encode"),
    ("fsdp", {"unit_bytes": 1, "reshard_after_forward": False}, "scaler", "forward"),
    ("fsdp", {"unit_bytes": 1, "activation_checkpointing": [nn.Linear]}, "scaler", "forward"),
    ("fsdp_cpu_offload", {}, "denominator", "forward"),
    ("hsdp", {"device_mesh": (2, 1)}, "denominator", "forward"),
]


@pytest.mark.parametrize(("name", "options", "loss", "method"), RUNS)
def test_every_module_a_loss_runs_through_gets_the_gradients_of_plain_pytorch(
    worlds: Any, name: str, options: dict[str, Any], loss: str, method: str
) -> None:
    _, reduce, divided, bound = LOSSES[loss]
    truth = make()
    count = sum(2 * batch(rank).numel() for rank in range(2)) if divided else 2
    for rank in range(2):
        (2 * reduce(truth[1](truth[0](batch(rank)))) / count).backward()
    for rank, found in enumerate(worlds(2).run(through_two, name, options, loss, method)):
        for (gradients, norm), module in zip(found, truth, strict=True):
            expected = {key: parameter.grad for key, parameter in module.named_parameters()}
            assert norm == pytest.approx(torch.nn.utils.get_total_norm(expected.values()).item(), rel=bound)
            oracle.assert_same_weights(gradients, {} if rank else expected, bound, elementwise=True)
