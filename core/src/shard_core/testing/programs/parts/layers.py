"""Layers and blocks of them, as models have them."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint

from shard_core.testing.programs.parts.dropout import Dropout
from shard_core.testing.programs.parts.part import WIDTH, Linear, Part

if TYPE_CHECKING:
    from collections.abc import Callable


class _Twice(Linear):
    """One layer, called twice."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(hidden, tokens), tokens)


class Extra(Linear):
    """A block that only some forwards call."""


class _Activated(Part):
    """A layer and a bend whose gradient its own output is saved for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.bend = nn.ELU()

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.bend(self.layer(hidden))
        return out


class _Odd(Part):
    """Widths that divide by nothing, and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Sequential(nn.Linear(5, 7), nn.Linear(7, WIDTH)))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.inner(hidden)
        return out


class _Convolution(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.layer(hidden.transpose(1, 2))).transpose(1, 2)


class _Norm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(hidden)
        return out


class _BatchNorm(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(hidden.transpose(1, 2)).transpose(1, 2)
        return out


class _Attention(Part):
    """Attention without a bias of the keys: its true gradient is zero, and adaptive optimizers make steps of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        query, key, value = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.mixed(hidden).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _Heads(Part):
    """Attention whose queries and keys are normalized head by head, by one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norm = nn.RMSNorm(WIDTH // 2)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        heads = (layer(hidden).unflatten(-1, (-1, WIDTH // 2)) for layer in (self.query, self.key, self.value))
        query, key, value = (each.transpose(1, 2) for each in (self.norm(next(heads)), self.norm(next(heads)), *heads))
        mixed = functional.scaled_dot_product_attention(query, key, value)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _Experts(Part):
    """Two experts, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        weights = self.gate(hidden).softmax(-1)
        return torch.tanh(sum(weights[..., i : i + 1] * each(hidden) for i, each in enumerate(self.experts)))


class _Routed(Part):
    """Two experts, each given the rows that a router sends it: on some ranks there may be none for one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        chances = self.router(hidden).softmax(-1)
        chosen = tokens % 5 // 4  # of the data, not of numbers that rounding may turn round
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            out[rows] = (expert(hidden[rows]).tanh() * chances[rows][:, number : number + 1]).to(out)
        return out


class _Recomputed(Linear):
    """A layer whose activations are computed again in backward."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint.checkpoint(super().forward, hidden, tokens, use_reentrant=False)
        return out


class _Pair(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](hidden))))


class _Nested(Part):
    """Blocks inside blocks, of each class several."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Pair() for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden, tokens)
        return hidden


class _Boxing(Linear):
    """A layer that hands on an object, with what it has computed for an attribute."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> types.SimpleNamespace:  # type: ignore[override]
        return types.SimpleNamespace(hidden=super().forward(hidden, tokens))


class _Boxed(Part):
    """Blocks that hand on objects to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Boxing() for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        box = types.SimpleNamespace(hidden=hidden)
        for block in self.blocks:
            box = block(box.hidden, tokens)
        out: torch.Tensor = box.hidden
        return out


class _Counter(Part):
    """A buffer that every forward moves on, and one that checkpoints leave out."""

    calls: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.rand(WIDTH) - 0.5, persistent=False)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if self.training:
            self.calls.add_(1)
        return torch.tanh(self.layer(hidden) + self.shift) * (1 + 0.01 * self.calls)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "activated": _Activated,
    "odd": _Odd,
    "convolution": _Convolution,
    "norm": _Norm,
    "batch_norm": _BatchNorm,
    "attention": _Attention,
    "heads": _Heads,
    "twice": _Twice,
    "extra": Extra,
    "dropout": Dropout,
    "experts": _Experts,
    "routed": _Routed,
    "recomputed": _Recomputed,
    "counter": _Counter,
    "nested": _Nested,
    "boxed": _Boxed,
}
"""Layers and blocks of them, by name."""
