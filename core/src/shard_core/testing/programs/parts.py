"""What the models of random programs are put together from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTH, WIDTH, VOCABULARY = 4, 8, 11

_Gradients = tuple[torch.Tensor, ...] | torch.Tensor


class _Part(nn.Module):
    """Adds something of shape (rows, 4, 8) to what came in."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Linear(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a part's signature
        return torch.tanh(self.layer(hidden))


class _Twice(_Linear):
    """One layer, called twice."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(hidden, tokens), tokens)


class Extra(_Linear):
    """A block that only some forwards call."""


class _Frozen(_Linear):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class _Odd(_Part):
    """Widths that divide by nothing, and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Sequential(nn.Linear(5, 7), nn.Linear(7, WIDTH)))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.inner(hidden)
        return out


class _Convolution(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.layer(hidden.transpose(1, 2))).transpose(1, 2)


class _Embedding(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(tokens)
        return out


class _Tied(_Part):
    """An embedding whose weights are also those of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(tokens) + self.logits(hidden).mean(-1, keepdim=True)
        return out


class _Norm(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(hidden)
        return out


class _BatchNorm(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(hidden.transpose(1, 2)).transpose(1, 2)
        return out


class _Attention(_Part):
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


class _Dropout(_Linear):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.4)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dropout(super().forward(hidden, tokens))
        return out


class _Experts(_Part):
    """Two experts, weighed by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        weights = self.gate(hidden).softmax(-1)
        return torch.tanh(sum(weights[..., i : i + 1] * each(hidden) for i, each in enumerate(self.experts)))


class _Routed(_Part):
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


class _Hooked(_Linear):
    """A layer with hooks before and after its forward, and a hook of the gradients that flow back through it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_pre_hook(_scaled_input)
        self.layer.register_forward_hook(_scaled_output)
        self.layer.register_full_backward_hook(_scaled_gradient)


def _scaled_input(module: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:  # noqa: ARG001 - torch's
    return (inputs[0] * 1.5,)


def _scaled_output(module: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    return output * 0.75


def _scaled_gradient(module: nn.Module, given: _Gradients, received: _Gradients) -> _Gradients:  # noqa: ARG001
    return given if given[0] is None else (0.5 * given[0],)  # the batch itself needs no gradient


class _Recomputed(_Linear):
    """A layer whose activations are computed again in backward."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint.checkpoint(super().forward, hidden, tokens, use_reentrant=False)
        return out


class _Parametrized(_Linear):
    """A layer whose weight is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.layer)


class _ParameterList(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = torch.sin(hidden * self.vectors[0] + self.vectors[1])
        return out


class _Scalar(_Part):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(hidden * self.temperature)


class _Empty(_Linear):
    """A parameter without an element, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, tokens) + self.empty.sum()


class _Adapter(_Part):
    """A frozen layer and two narrow ones beside it that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.base(hidden) + self.up(self.down(hidden)))


class _Padded(_Part):
    """An embedding one of whose rows is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(tokens)
        return out


class _Shared(_Part):
    """A weight with three users."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(hidden)))))
        return out


class _Pair(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.layers[1](torch.tanh(self.layers[0](hidden))))


class _Nested(_Part):
    """Blocks inside blocks, of each class several."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Pair() for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden, tokens)
        return hidden


class _Spare(_Linear):
    """A layer, and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(3, 2))


class _Wide(_Part):
    """A layer made in float64, which a precision casts like all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.layer(hidden.to(self.layer.weight.dtype))).to(hidden)


class _HookedParameter(_Linear):
    """A layer whose weight has a hook on its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight.register_hook(_halved)


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return 0.5 * gradient


class _Counter(_Part):
    """A buffer that every forward moves on, and one that checkpoints leave out."""

    calls: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH), persistent=False)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if self.training:
            self.calls.add_(1)
        return torch.tanh(self.layer(hidden) + self.shift) * (1 + 0.01 * self.calls)


#: How ranks that share layers split them, in the styles of Hugging Face's plans; the other parts stay whole.
PLAN = {
    "linear.layer": "colwise_gather_output",
    "twice.layer": "rowwise_split_input",
    "adapter.down": "colwise",
    "adapter.up": "rowwise",
    "embedding.layer": "colwise_gather_output",
    "experts.experts.*": "colwise_gather_output",
    "dropout.layer": "colwise_gather_output",
}
PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": _Linear,
    "odd": _Odd,
    "convolution": _Convolution,
    "embedding": _Embedding,
    "tied": _Tied,
    "norm": _Norm,
    "batch_norm": _BatchNorm,
    "attention": _Attention,
    "twice": _Twice,
    "extra": Extra,
    "dropout": _Dropout,
    "experts": _Experts,
    "routed": _Routed,
    "hooked": _Hooked,
    "recomputed": _Recomputed,
    "parametrized": _Parametrized,
    "parameter_list": _ParameterList,
    "scalar": _Scalar,
    "empty": _Empty,
    "frozen": _Frozen,
    "adapter": _Adapter,
    "counter": _Counter,
    "padded": _Padded,
    "shared": _Shared,
    "nested": _Nested,
    "spare": _Spare,
    "wide": _Wide,
    "hooked_parameter": _HookedParameter,
}
"""The parts by name."""
SKIPPING = ("extra", "spare")
"""Parts with parameters that some losses, or all, do not reach."""
