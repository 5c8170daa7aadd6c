"""What the models of random programs are put together from, and the batches they are given."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from shard_core.errors import nearest

if TYPE_CHECKING:
    from collections.abc import Callable

    from shard_core.strategy import Strategy

_LENGTH, _WIDTH, _OUTPUTS, _VOCABULARY = 4, 8, 3, 11

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | dict[str, torch.Tensor]


class Batch(NamedTuple):
    """What one rank is given.

    Attributes:
        inputs: Shape (rows, 4, 8).
        tokens: Shape (rows, 4), from 0 to 10.
        targets: Shape (rows, 3).
    """

    inputs: torch.Tensor
    tokens: torch.Tensor
    targets: torch.Tensor


def batch(key: int, rank: int, rows: int, dtype: torch.dtype = torch.float32) -> Batch:
    """Draw a data rank's batch, the same wherever it is drawn.

    Args:
        key: Which batch.
        rank: Of the data rank.
        rows: How many samples; may be 0.
        dtype: Of the inputs, which are drawn in float32.

    Returns:
        The tensors, in host memory.

    Example:
        >>> batch(3, 0, 2).inputs.shape
        torch.Size([2, 4, 8])
    """
    generator = torch.Generator().manual_seed(1000 * key + rank)
    return Batch(
        torch.randn(rows, _LENGTH, _WIDTH, generator=generator).to(dtype),
        torch.randint(_VOCABULARY, (rows, _LENGTH), generator=generator),
        torch.randn(rows, _OUTPUTS, generator=generator),
    )


class Model(nn.Module):
    """A chain of parts, each added to what came in, and a layer on top.

    Args:
        parts: Names from ``PARTS``, each at most once.
        output: What forward returns: ``"tensor"``, ``"tuple"`` or ``"dict"``.
    """

    def __init__(self, *parts: str, output: str = "tensor") -> None:
        super().__init__()
        unknown = next((part for part in parts if part not in PARTS), None)
        if unknown is not None:
            raise KeyError(f"no part {unknown!r}{nearest(unknown, PARTS)}; there are: {', '.join(PARTS)}")
        self.output = output
        self.parts = nn.ModuleDict({name: PARTS[name]() for name in parts})
        self.head = nn.Linear(_WIDTH, _OUTPUTS)
        plan = {f"parts.{name}": style for name, style in _PLAN.items() if name.partition(".")[0] in parts}
        self.config = types.SimpleNamespace(base_model_tp_plan={**plan, "head": "rowwise_split_input"})

    def forward(self, given: Batch, extra: bool = False) -> Output:
        """Compute a prediction of shape (rows, 3) and, in a tuple or a dict, an auxiliary value a row."""
        hidden = given.inputs
        for part in self.parts.values():
            if extra or not isinstance(part, _Extra):
                hidden = hidden + part(hidden, given.tokens)
        prediction = self.head(hidden.mean(1))
        auxiliary = hidden.square().mean((1, 2))
        if self.output == "tuple":
            return prediction, auxiliary
        return {"prediction": prediction, "auxiliary": auxiliary} if self.output == "dict" else prediction

    def score(self, given: Batch, extra: bool = False) -> torch.Tensor:
        """Compute a number a row: a method other than forward that is trained through, too."""
        return tensors_of(self.forward(given, extra))[0].tanh().sum(1)


def tensors_of(output: Output) -> list[torch.Tensor]:
    """List the tensors of a model's output, the prediction first."""
    if isinstance(output, torch.Tensor):
        return [output]
    return list(output.values()) if isinstance(output, Mapping) else list(output)


def loss_of(output: Output, given: Batch, reduction: str = "mean") -> torch.Tensor:
    """Compute the loss of a model's output: the mean over the rows, or with ``"sum"`` their sum."""
    prediction, *auxiliary = tensors_of(output)
    rows = (prediction - given.targets.to(prediction)).square().mean(1)
    rows = rows + sum(0.1 * each for each in auxiliary)
    return rows.sum() if reduction == "sum" else rows.mean()


class _Part(nn.Module):
    """Adds something of shape (rows, 4, 8) to what came in."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _Linear(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - a part's signature
        return torch.tanh(self.layer(hidden))


class _Twice(_Linear):
    """One layer, called twice."""

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(hidden, tokens), tokens)


class _Extra(_Linear):
    """A block that only some forwards call."""


class _Frozen(_Linear):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class _Odd(_Part):
    """Widths that divide by nothing, and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(_WIDTH, 5), nn.GELU(), nn.Sequential(nn.Linear(5, 7), nn.Linear(7, _WIDTH))
        )

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.inner(hidden)
        return out


class _Convolution(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(_WIDTH, _WIDTH, 3, padding=1)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.layer(hidden.transpose(1, 2))).transpose(1, 2)


class _Embedding(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Embedding(_VOCABULARY, _WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(tokens)
        return out


class _Tied(_Part):
    """An embedding whose weights are also those of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.logits = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.logits.weight = self.embedding.weight

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.embedding(tokens) + self.logits(hidden).mean(-1, keepdim=True)
        return out


class _Norm(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LayerNorm(_WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(hidden)
        return out


class _BatchNorm(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.BatchNorm1d(_WIDTH)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        out: torch.Tensor = self.layer(hidden.transpose(1, 2)).transpose(1, 2)
        return out


class _Attention(_Part):
    """Attention without a bias of the keys: its true gradient is zero, and adaptive optimizers make steps of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH)

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
        self.gate = nn.Linear(_WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(2))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        weights = self.gate(hidden).softmax(-1)
        return torch.tanh(sum(weights[..., i : i + 1] * each(hidden) for i, each in enumerate(self.experts)))


class _ParameterList(_Part):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = nn.ParameterList(nn.Parameter(torch.randn(_WIDTH)) for _ in range(2))

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
        self.empty = nn.Parameter(torch.empty(0, _WIDTH))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden, tokens) + self.empty.sum()


class _Adapter(_Part):
    """A frozen layer and two narrow ones beside it that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.down = nn.Linear(_WIDTH, 2, bias=False)
        self.up = nn.Linear(2, _WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        return torch.tanh(self.base(hidden) + self.up(self.down(hidden)))


class _Counter(_Part):
    """A buffer that every forward moves on, and one that checkpoints leave out."""

    calls: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("shift", torch.linspace(-1, 1, _WIDTH), persistent=False)

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        if self.training:
            self.calls.add_(1)
        return torch.tanh(self.layer(hidden) + self.shift) * (1 + 0.01 * self.calls)


#: How ranks that share layers split them, in the styles of Hugging Face's plans; the other parts stay whole.
_PLAN = {
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
    "extra": _Extra,
    "dropout": _Dropout,
    "experts": _Experts,
    "parameter_list": _ParameterList,
    "scalar": _Scalar,
    "empty": _Empty,
    "frozen": _Frozen,
    "adapter": _Adapter,
    "counter": _Counter,
}
"""The parts by name."""


def parameters_of(model: nn.Module, groups: int = 1, share: int | None = None) -> list[dict[str, Any]]:
    """List a model's parameters as param groups.

    Args:
        model: Any model.
        groups: 1, or 2: matrices, and the rest at twice the learning rate and without weight decay.
        share: 0 or 1 for every other parameter, where two optimizers share a model.

    Returns:
        What an optimizer takes.
    """
    parameters = list(model.parameters())[slice(share, None, None if share is None else 2)]
    if groups == 1:
        return [{"params": parameters}]
    return [
        {"params": [each for each in parameters if each.ndim >= 2]},
        {"params": [each for each in parameters if each.ndim < 2], "lr": 0.03, "weight_decay": 0.0},
    ]


def evaluate(strategy: Strategy, model: nn.Module, key: int, samples: int, batch_size: int) -> torch.Tensor:
    """Evaluate a set-up model on a data set, each sample once.

    Args:
        strategy: What set it up.
        model: What setup returned.
        key: Of the batch whose rows are the data set.
        samples: Its size.
        batch_size: Of each rank.

    Returns:
        The predictions, in the order of the data set.
    """
    data = torch.utils.data.TensorDataset(*batch(key, 0, samples, next(model.parameters()).dtype))
    loader = strategy.process_dataloader(torch.utils.data.DataLoader(data, batch_size=batch_size))
    model.eval()
    with torch.no_grad():
        outputs = [strategy.gather_for_metrics(tensors_of(model(Batch(*each)))[0]) for each in loader]
    model.train()
    return torch.cat(outputs)
