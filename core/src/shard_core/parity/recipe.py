"""What is trained and how: the user's words, checked, in a form that travels to the ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shard_core.errors import InvalidOption, nearest
from shard_core.parity import batch as batches
from shard_core.parity.script import ScriptFunction
from shard_core.randomness import seed_everything

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

OPTIMIZERS = ("sgd", "adamw")
_ADAMW_RATE = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the user's model is made and trained, alike in plain PyTorch and under a strategy.

    Attributes:
        make_model: Returns the model, or the model and a batch.
        make_batch: Returns the batch; None takes the one that came with the model.
        loss: Makes the loss from output and batch; None expects it in the output.
        optimizer: ``"sgd"``, ``"adamw"`` or a function that takes the model.
        rate: The learning rate of SGD.
        steps: How many steps.
        seed: What random numbers start from.
        train_mode: Whether the model is left in the mode it was made in, else it is put into eval mode.
        folder: Where initial weights and the batch lie for the ranks.
    """

    make_model: ScriptFunction
    make_batch: ScriptFunction | None = None
    loss: ScriptFunction | None = None
    optimizer: str | ScriptFunction = "sgd"
    rate: float = 0.0
    steps: int = 3
    seed: int = 0
    train_mode: bool = False
    folder: str

    def prepare(self) -> torch.nn.Module:
        """Build model and batch once, and save weights and batch where every run loads them from.

        Returns:
            The model, in the mode it is trained in.

        Raises:
            InvalidOption: If there is no model, no batch, nothing to train, or a batch that cannot be used.
        """
        seed_everything(self.seed)
        model, found = self._make()
        if self.make_batch is not None:
            found = self.make_batch.load()()
        if found is None:
            raise InvalidOption(
                f"{self.make_model} returns a model without a batch; let it return both, or give --batch "
                "script.py:function."
            )
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise InvalidOption(f"the model of {self.make_model} has no parameter that is trained.")
        torch.save(batches.plain_batch(found), self._path("batch"))
        torch.save({name: tensor.detach().cpu() for name, tensor in _tensors(model).items()}, self._path("weights"))
        return model

    def model(self) -> torch.nn.Module:
        """Build the model again, with the initial weights of the first time whatever it draws."""
        seed_everything(self.seed)
        model, _ = self._make()
        initial = torch.load(self._path("weights"), weights_only=True)
        mine = _tensors(model)
        changed = [name for name in {**initial, **mine} if _shape(initial, name) != _shape(mine, name)]
        if changed:
            raise InvalidOption(
                f"{self.make_model} makes another model each time it is called: {changed[0]!r} is not the same; let it "
                "depend on nothing but its seed."
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(initial[name])
        return model

    def batch(self) -> Any:
        """Load the batch."""
        return torch.load(self._path("batch"), weights_only=True)

    def loss_of(self, call: Callable[..., Any], batch: Any) -> torch.Tensor:
        """Call a model on a batch and return the loss."""
        return batches.loss_of(call, batch, self.loss.load() if self.loss else None)

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer over a model's parameters."""
        if isinstance(self.optimizer, ScriptFunction):
            made = self.optimizer.load()(model)
            if not isinstance(made, torch.optim.Optimizer):
                raise InvalidOption(f"{self.optimizer} returned {type(made).__name__}; it must return an optimizer.")
            return made
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr=_ADAMW_RATE)
        return torch.optim.SGD(trained, lr=self.rate, momentum=0.9)

    def _make(self) -> tuple[torch.nn.Module, Any]:
        made = self.make_model.load()()
        model, found = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        if not isinstance(model, torch.nn.Module):
            raise InvalidOption(
                f"{self.make_model} returned {type(made).__name__}; it must return a torch.nn.Module, or a module and "
                "a batch."
            )
        return model if self.train_mode else model.eval(), found

    def _path(self, what: str) -> Path:
        return Path(self.folder, f"{what}.pt")


def optimizer_named(text: str) -> str | ScriptFunction:
    """Read what the user typed for an optimizer.

    Args:
        text: A name, or ``script.py:function``.

    Raises:
        InvalidOption: If it is neither.
    """
    if text in OPTIMIZERS:
        return text
    if ":" in text:
        return ScriptFunction.of(text, "model")
    hint = nearest(text, OPTIMIZERS)
    raise InvalidOption(
        f"there is no optimizer {text!r}{hint or ';'} give {', '.join(OPTIMIZERS)} or script.py:function."
    )


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _shape(tensors: Mapping[str, torch.Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None
