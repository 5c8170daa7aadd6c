"""Methods other than forward that call one layer of a unit."""

from typing import Any

import torch
from torch import nn

from shard_core import get_strategy


class Stack(nn.Module):
    """Layers that share units, of which a method calls one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers(rows)
        return hidden

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers[0](rows)
        return hidden


def calls_seen() -> tuple[list[str], torch.Tensor | None]:
    """Give what users' hooks saw of the first two layers, and the gradient of the one that was called."""
    with get_strategy("fsdp", unit_bytes=160) as strategy:
        model = strategy.setup_module(Stack())
        own, seen = strategy.unwrap(model), []
        for number in (0, 1):
            own.layers[number].register_forward_pre_hook(lambda *_, number=number: seen.append(f"before {number}"))
            own.layers[number].register_forward_hook(lambda *_, number=number: seen.append(f"after {number}"))
        strategy.backward(own.encode(torch.ones(2, 4)).sum(), model)
        return seen, strategy.module_gradients(model).get("layers.0.weight")


def test_a_method_calls_no_hooks_of_layers_that_it_does_not_call(worlds: Any) -> None:
    seen, gradient = worlds(2).run(calls_seen)[0]
    assert seen == ["before 0", "after 0"]
    torch.testing.assert_close(gradient, torch.full((4, 4), 2.0))
