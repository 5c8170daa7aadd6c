"""Parameters of unusual kinds: frozen, shared, unused, without elements or dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

from shard_core.testing.programs.parts.part import VOCABULARY, WIDTH, Linear, Part

if TYPE_CHECKING:
    from collections.abc import Callable


class _Frozen(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class _Embedding(Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(tokens)
        return out


class _Tied(Part):
    """An embedding whose weights are also those of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.logits = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(tokens) + self.logits(hidden).mean(-1, keepdim=True)
        return out


class _Parametrized(Linear):
    """A layer whose weight is computed from two parameters."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.layer)


class _ParameterList(Part):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = torch.sin(hidden * self.vectors[0] + self.vectors[1])
        return out


class _Scalar(Part):
    """A parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(hidden * self.temperature)


class _Empty(Linear):
    """A parameter without an element, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, tokens) + self.empty.sum()


class _Adapter(Part):
    """A frozen layer and two narrow ones beside it that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.base(hidden) + self.up(self.down(hidden)))


class _Lora(Part):
    """Two frozen layers with adapters of trained ones inside, by the names that PEFT gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = _WithLora(WIDTH, 2 * WIDTH), _WithLora(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.narrow(torch.tanh(self.wide(hidden)))
        return out


class _WithLora(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base_layer = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_dropout = nn.ModuleDict({"default": nn.Identity()})
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, outputs, bias=False)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        low = self.lora_A["default"](self.lora_dropout["default"](hidden))
        out: torch.Tensor = self.base_layer(hidden) + 2.0 * self.lora_B["default"](low)
        return out


class _Padded(Part):
    """An embedding one of whose rows is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(VOCABULARY, WIDTH, padding_idx=3)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(tokens)
        return out


class _Sparse(Part):
    """An embedding whose gradient holds the rows alone that were looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(VOCABULARY, WIDTH, sparse=True)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(tokens)
        return out


class _Shared(Part):
    """A weight with three users."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second, self.third = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.second.weight = self.third.weight = self.first.weight

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.third(torch.tanh(self.second(torch.tanh(self.first(hidden)))))
        return out


class _Spare(Linear):
    """A layer, and a parameter that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.randn(3, 2))


class _Weighed(Linear):
    """A layer that reads the weights of all it is made of, as a penalty does."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        penalty = sum(each.to(hidden).square().sum() for each in self.parameters())
        return super().forward(hidden, tokens) + 0.01 * penalty


class _Clamped(Linear):
    """A layer whose forward writes to its weight before it computes with it, in training something else each time."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.layer.weight.clamp_(-0.25, 0.25)
            if self.training:
                self.layer.weight.mul_(0.98)
        return super().forward(hidden, tokens)


class _Reassigned(Linear):
    """A layer whose forward assigns its weight other data before it computes with it, as code that keeps norms does."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        weight.data = weight.data.clamp(-0.25, 0.25) * (0.98 if self.training else 1.0)
        return super().forward(hidden, tokens)


class _Rewritten(_Clamped):
    """A layer that writes to its weight once more where its activations are computed again in backward."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint.checkpoint(super().forward, hidden, tokens, use_reentrant=False)
        return out


class _Transposed(Linear):
    """A layer whose weight is not contiguous, as what is read from another framework's files, or transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.weight = nn.Parameter(self.layer.weight.detach().t())


class _Narrow(Part):
    """A gate with one output, whose weight has fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return hidden * torch.sigmoid(self.gate(hidden))


class _Turned(Part):
    """Complex numbers that turn what comes in, beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.sin((hidden * self.turns).real * self.scale)


class _Wide(Part):
    """A layer made in float64, which a precision casts like all others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.layer(hidden.to(self.layer.weight.dtype))).to(hidden)


PARAMETERS: dict[str, Callable[[], nn.Module]] = {
    "embedding": _Embedding,
    "tied": _Tied,
    "parametrized": _Parametrized,
    "parameter_list": _ParameterList,
    "scalar": _Scalar,
    "empty": _Empty,
    "frozen": _Frozen,
    "adapter": _Adapter,
    "lora": _Lora,
    "padded": _Padded,
    "sparse": _Sparse,
    "shared": _Shared,
    "spare": _Spare,
    "weighed": _Weighed,
    "clamped": _Clamped,
    "wide": _Wide,
    "reassigned": _Reassigned,
    "rewritten": _Rewritten,
    "transposed": _Transposed,
    "narrow": _Narrow,
    "turned": _Turned,
}
"""Parts with such parameters, by name."""
