"""Small models, each with one thing that goes wrong in distributed training, and batches to train them on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from shard_core.errors import nearest

if TYPE_CHECKING:
    from shard_core.strategy import Strategy

_VOCABULARY, _CONTEXT, _WIDTH, _HEADS, _BLOCKS = 256, 16, 32, 2, 2
_INPUTS, _OUTPUTS = 6, 3


def make(name: str) -> nn.Module:
    """Build a model of the zoo with weights from torch's current seed.

    Its ``forward(*batch, reduction="mean")`` is the loss over the samples it is given: the mean over
    ``targets.numel()`` numbers, or their sum with ``reduction="sum"``.

    Args:
        name: One of ``NAMES``.

    Returns:
        The model, on torch's default device.

    Example:
        >>> model = make("gpt")
        >>> model.head.weight is model.embedding.weight
        True
    """
    if name not in _MODELS:
        raise KeyError(f"no model {name!r}{nearest(name, NAMES)}; there are: {', '.join(NAMES)}")
    return _MODELS[name]()


def batches(name: str, steps: int, global_batch: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Draw global batches for a model of the zoo, the same wherever they are drawn.

    Args:
        name: One of ``NAMES``.
        steps: How many batches.
        global_batch: How many samples in each.
        seed: What they are drawn from.

    Returns:
        Pairs of inputs and targets; ``model(*pair)`` is the loss.
    """
    generator = torch.Generator().manual_seed(seed)
    if name == "gpt":
        shape = (global_batch, _CONTEXT + 1)
        texts = [torch.randint(_VOCABULARY, shape, generator=generator) for _ in range(steps)]
        return [(text[:, :-1], text[:, 1:]) for text in texts]
    return [
        (
            torch.randn(global_batch, _INPUTS, generator=generator),
            torch.randn(global_batch, _OUTPUTS, generator=generator),
        )
        for _ in range(steps)
    ]


def share(batch: tuple[Any, ...], rank: int, world_size: int) -> tuple[Any, ...]:
    """Slice one rank's equal part out of a global batch.

    Args:
        batch: Tensors whose first dimension is the samples, a multiple of ``world_size``.
        rank: Whose part.
        world_size: How many parts.

    Returns:
        Views of the tensors.

    Example:
        >>> share((torch.arange(6),), 1, 3)
        (tensor([2, 3]),)
    """
    assert all(len(tensor) % world_size == 0 for tensor in batch), "the global batch does not divide"
    return tuple(tensor.chunk(world_size)[rank] for tensor in batch)


def share_of(strategy: Strategy, batch: tuple[Any, ...]) -> tuple[Any, ...]:
    """Slice the part that a strategy's data rank trains on out of a global batch, on its device.

    Args:
        strategy: Started; ranks that see the same data get the same part.
        batch: Tensors whose first dimension is the samples.

    Returns:
        The tensors.
    """
    data = strategy.distributed_sampler_kwargs
    return strategy.batch_to_device(share(batch, data["rank"], data["num_replicas"]))


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Split what is trained into two groups: matrices decay, the rest does not and learns faster.

    Args:
        model: Any model.

    Returns:
        What an optimizer takes as its first argument.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 0.02},
    ]


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer over the two groups of a model.

    Args:
        name: ``"adamw"``, ``"sgd"`` (with momentum) or ``"adagrad"``.
        model: The model whose ``param_groups`` it gets.

    Returns:
        The optimizer.
    """
    groups = param_groups(model)
    if name == "adamw":
        # With the default eps an element whose gradient is nothing but rounding moves by a whole step, either way.
        return torch.optim.AdamW(groups, lr=0.01, eps=1e-6)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    if name == "adagrad":
        return torch.optim.Adagrad(groups, lr=0.01)
    raise KeyError(f"no optimizer {name!r}{nearest(name, OPTIMIZERS)}; there are: {', '.join(OPTIMIZERS)}")


class _Regression(nn.Module):
    """Two layers and a squared error; the models below change one thing about it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_INPUTS, 8)
        self.second = nn.Linear(8, _OUTPUTS)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return functional.mse_loss(self.predict(inputs), targets, reduction=reduction)

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        predicted: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return predicted


class _Frozen(_Regression):
    """The first layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class _Unused(_Regression):
    """A layer is trained but no forward uses it: it has no gradient and must keep its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class _Buffers(_Regression):
    """Forward reads a constant, a constant that checkpoints leave out, and counts its calls."""

    scale: torch.Tensor
    shift: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(_INPUTS) + 0.5)
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, _INPUTS), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().predict(inputs * self.scale + self.shift)


class _Uneven(_Regression):
    """No dimension divides by 2 or by 3, and one parameter has fewer elements than there may be ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_INPUTS, 5)
        self.middle = nn.Linear(5, 7)
        self.second = nn.Linear(7, _OUTPUTS, bias=False)
        self.offset = nn.Parameter(torch.randn(_OUTPUTS))
        self.gain = nn.Parameter(torch.randn(1))

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(torch.tanh(self.first(inputs))))
        predicted: torch.Tensor = self.second(hidden) * self.gain + self.offset
        return predicted


class _Scalar(_Regression):
    """One parameter has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().predict(inputs) * self.temperature


class _Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(_WIDTH)
        self.attention = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.norm_2 = nn.LayerNorm(_WIDTH)
        self.expand = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.contract = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        samples, length, _ = hidden.shape
        heads = self.attention(self.norm_1(hidden)).view(samples, length, 3, _HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mix(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = hidden + self.contract(functional.gelu(self.expand(self.norm_2(hidden))))
        return out


class _GPT(nn.Module):
    """A byte-level transformer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.position = nn.Embedding(_CONTEXT, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_BLOCKS))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        hidden = self.embedding(inputs) + self.position(torch.arange(inputs.shape[1], device=inputs.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=reduction)


_MODELS: dict[str, type[nn.Module]] = {
    "plain": _Regression,
    "gpt": _GPT,
    "frozen": _Frozen,
    "unused": _Unused,
    "buffers": _Buffers,
    "uneven": _Uneven,
    "scalar": _Scalar,
}

NAMES = tuple(_MODELS)
"""Every model: ``gpt`` ties its output layer to its embedding, the others are small regressions."""

OPTIMIZERS = ("adamw", "sgd", "adagrad")
"""Every optimizer ``make_optimizer`` builds."""
