"""The models of random programs, the batches they are given, and what is done with them."""

from __future__ import annotations

import os
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shard_core.errors import nearest
from shard_core.testing.programs.parts import LENGTH, PARTS, PLAN, VOCABULARY, WIDTH, Extra, Framed, Linear

if TYPE_CHECKING:
    from shard_core.strategy import Strategy

_OUTPUTS = 3


class Interruption(Exception):
    """Ends a forward or a backward, as a lack of memory does."""


class Stubborn:
    """An object of a user's that is saved and loaded with all else, and may refuse what it is given.

    Attributes:
        refuses: Whether it does.
    """

    def __init__(self) -> None:
        self.refuses = False

    def state_dict(self) -> dict[str, int]:
        """Return what is saved of it."""
        return {"version": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take what was saved.

        Raises:
            Interruption: If it refuses.
        """
        if self.refuses:
            raise Interruption(f"an object that takes no {state}")


class Outcome:
    """What a model returns as an object: a prediction, and an object with more."""

    def __init__(self, prediction: torch.Tensor, auxiliary: torch.Tensor) -> None:
        self.prediction = prediction
        self.more = types.SimpleNamespace(rows=len(prediction), auxiliary=auxiliary)


Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | dict[str, torch.Tensor] | Outcome


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
        torch.randn(rows, LENGTH, WIDTH, generator=generator).to(dtype),
        torch.randint(VOCABULARY, (rows, LENGTH), generator=generator),
        torch.randn(rows, _OUTPUTS, generator=generator),
    )


class Model(nn.Module):
    """A chain of parts, each added to what came in, and a layer on top.

    Args:
        parts: Names from ``PARTS``, each at most once.
        output: What forward returns: ``"tensor"``, ``"tuple"``, ``"dict"``, or an ``"object"`` of a class of its own.
    """

    def __init__(self, *parts: str, output: str = "tensor") -> None:
        super().__init__()
        unknown = next((part for part in parts if part not in PARTS), None)
        if unknown is not None:
            raise KeyError(f"no part {unknown!r}{nearest(unknown, PARTS)}; there are: {', '.join(PARTS)}")
        self.output = output
        self.parts = nn.ModuleDict({name: PARTS[name]() for name in parts})
        for part in self.parts.values():
            if isinstance(part, Framed):
                part.frame(self)
        self.head = nn.Linear(WIDTH, _OUTPUTS)
        self.bend = nn.Tanh()  # of no parameters, so that it may be called anywhere under every strategy
        plan = {f"parts.{name}": style for name, style in PLAN.items() if name.partition(".")[0] in parts}
        self.config = types.SimpleNamespace(base_model_tp_plan={**plan, "head": "rowwise_split_input"})

    def forward(
        self, given: Batch, extra: bool = False, unused: bool = False, fails: bool | type[BaseException] = False
    ) -> Output:
        """Compute a prediction of shape (rows, 3) and, in a tuple or a dict, an auxiliary value a row.

        Args:
            given: What a rank is given.
            extra: Whether the block that is not always called is.
            unused: Whether what that block returns is not used.
            fails: Whether an exception ends it, or which one, before the last part if it has any.
        """
        hidden = given.inputs
        for number, part in enumerate(self.parts.values(), 1):
            if fails and number == len(self.parts):
                break
            if extra or not isinstance(part, Extra):
                made = part(hidden, given.tokens)
                hidden = hidden if unused and isinstance(part, Extra) else hidden + made
        if fails:
            raise (Interruption if fails is True else fails)("before the layer on top")
        prediction = self.head(hidden.mean(1))
        auxiliary = hidden.square().mean((1, 2))
        if self.output == "tuple":
            return prediction, auxiliary
        if self.output == "object":
            return Outcome(prediction, auxiliary)
        return {"prediction": prediction, "auxiliary": auxiliary} if self.output == "dict" else prediction

    def save_pretrained(self, folder: str) -> None:
        """Write the weights into a folder, as Hugging Face's models do, in a file of ``torch.save``."""
        os.makedirs(folder, exist_ok=True)
        torch.save(self.state_dict(), os.path.join(folder, "weights.pt"))

    def score(self, given: Batch, extra: bool = False, unused: bool = False) -> torch.Tensor:
        """Compute a number a row: a method other than forward that is trained through, too."""
        return tensors_of(self.forward(given, extra, unused))[0].tanh().sum(1)

    def layers(self, given: Batch, extra: bool = False, unused: bool = False) -> torch.Tensor:
        """Compute a number a row through some layers alone, each called by itself, wherever it stands."""
        del extra, unused
        rows: torch.Tensor = self.head(given.inputs.mean(1)).sum(1)
        for part in self.parts.values():
            rows = rows + (part.layer(given.inputs).mean((1, 2)) if isinstance(part, Linear) else 0.0)
        return rows.tanh()


def tensors_of(output: Output) -> list[torch.Tensor]:
    """List the tensors of a model's output, the prediction first."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Outcome):
        return [output.prediction, output.more.auxiliary]
    return list(output.values()) if isinstance(output, Mapping) else list(output)


def loss_of(output: Output, given: Batch, reduction: str = "mean") -> torch.Tensor:
    """Compute the loss of a model's output, in float32 at least: the mean over rows, or with ``"sum"`` their sum."""
    prediction, *auxiliary = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in tensors_of(output))
    rows = (prediction - given.targets.to(prediction)).square().mean(1)
    rows = rows + sum(0.1 * each for each in auxiliary)
    return rows.sum() if reduction == "sum" else rows.mean()


def contrast_of(mine: torch.Tensor, everyone: torch.Tensor, rank: int) -> torch.Tensor:
    """Compute the loss of telling each of a data rank's rows from those of all, of shape (ranks, rows, 3)."""
    exact = torch.promote_types(mine.dtype, torch.float32)
    scores = mine.to(exact) @ everyone.flatten(0, 1).to(exact).T
    own = torch.arange(len(mine), device=scores.device) + rank * len(mine)
    return nn.functional.cross_entropy(scores, own)


def fed_back(given: Batch, output: Output, *, detached: bool = False) -> Batch:
    """Make a batch for another model of what one has made of a batch, be it without gradients for that one."""
    made = tensors_of(output)[0].mean(1)[:, None, None]
    return given._replace(inputs=given.inputs + (made.detach() if detached else made))


def parameters_of(
    model: nn.Module, groups: int = 1, share: int | str | None = None, without: str = ""
) -> list[dict[str, Any]]:
    """List a model's parameters as param groups.

    Args:
        model: Any model.
        groups: 1, or 2: matrices, and the rest at twice the learning rate and without weight decay.
        share: Where two optimizers share a model 0 or 1 for every other parameter, ``"matrices"`` for those with two
            dims, or ``"rest"`` for the others.
        without: The part whose parameters are left out, for a group that is added later.

    Returns:
        What an optimizer takes.
    """
    named = list(model.named_parameters())
    if isinstance(share, str):
        named = [(name, each) for name, each in named if (each.ndim == 2) is (share == "matrices")]
    elif share is not None:
        named = named[share::2]
    parameters = [each for name, each in named if f"parts.{without}." not in name]
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


def interleaved(shown: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Take each sample's output from the data rank that a distributed sampler gives it to."""
    outputs = [each["outputs"] for each in shown]
    rows = range(len(outputs[0]))
    return {"outputs": torch.stack([outputs[row % len(outputs)][row] for row in rows])}
